"""`kvq calibrate`: what it writes serves, what stands out is said, and scales are tried on other texts."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvq.evals import calibration_text, default_text
from kvq.formats import KVRecipe

FEW = ("--context", 128, "--max-windows", 2)


@pytest.mark.parametrize(("kv", "most"), [("int4_g32_s8_rot", 0.85), ("int4", 0.95)])
def test_centered_groups_are_better_at_the_same_bytes(kvq, tmp_path, kv, most):
    """Of int4 that is V alone, which is said: K has scales per channel."""
    out, path = tmp_path / "kvq.json", tmp_path / "p.json"
    status, said, _ = kvq("calibrate", "tiny", "--kv", kv, "--centered", "--out", out, "--max-windows", 8)
    assert status == 0
    assert f"{kv}, centered" in said
    assert ("only V has centers: K of int4 has scales per channel" in said) == (kv == "int4")
    centers = KVRecipe.load(out).centers.layers
    assert [layer.k is None for layer in centers] == [kv == "int4"] * 6
    few = ("--max-windows", 3, "--context", 512, "--json", path)
    status, _, _ = kvq("perplexity", "--kv", f"fp32,{kv},{out}", *few)
    plain, centered = json.loads(path.read_text())["rows"][1:]
    assert centered["kv_bytes_per_token"] == plain["kv_bytes_per_token"]
    assert centered["kl_mean"] < most * plain["kl_mean"]


def test_few_tokens_are_warned_of_and_what_is_taken_out_is_not_advised(kvq, tmp_path):
    short, out = tmp_path / "short.txt", tmp_path / "kvq.json"
    short.write_text("Hello, that is all of it.")
    status, said, err = kvq("calibrate", "tiny", "--kv", "int4", "--centered", "--out", out, "--text", short)
    assert status == 0
    assert re.search(r"warning: \d+ tokens say little", err)
    assert "takes them out" not in said
    status, said, err = kvq("calibrate", "tiny", "--kv", "int4", "--out", out, *FEW[2:], "--context", 200)
    assert (status, "say little" in err) == (0, False)
    assert "takes them out" in said


@pytest.mark.parametrize("kv", ["int8", "fp8_per_head", "bf16"])
def test_centering_is_for_grouped_formats(kvq, tmp_path, kv):
    status, _, err = kvq("calibrate", "tiny", "--kv", kv, "--centered", "--out", tmp_path / "k.json", *FEW)
    assert status == 2
    assert "--centered is for formats in groups, such as int4" in err
    assert not (tmp_path / "k.json").exists()


def test_what_was_seen_of_every_head_is_written(kvq, tmp_path):
    path = tmp_path / "heads.json"
    status, said, _ = kvq("calibrate", "tiny", "--out", tmp_path / "k.json", "--json", path, *FEW)
    assert status == 0
    assert re.search(r"huge biases: \d+ channels in K\d", said)  # this model's keys have some
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 6 * 2 * 2
    for row in rows:
        assert 0 < row["p99"] <= row["p999"] <= row["p9999"] <= row["absmax"]
        assert row["p99"] < row["clip_int8"] <= row["absmax"]
    scales = KVRecipe.load(tmp_path / "k.json").static_scales
    assert [row["absmax"] for row in rows if row["layer"] == 2 and row["part"] == "v"] == list(
        scales.layers[2].v
    )


@pytest.mark.long
def test_scales_of_one_kind_of_text_are_compared_with_those_of_another(kvq, tmp_path):
    """Code for prose: on this model both are alike, and the report says by how much."""
    code, prose = tmp_path / "code.txt", tmp_path / "prose.txt"
    code.write_text(Path(json.__file__).with_name("decoder.py").read_text())
    prose.write_text(default_text().text[:12000])
    status, said, _ = kvq(
        "calibrate", "tiny", "--text", code, "--check", prose, "--out", tmp_path / "k.json",
        "--json", tmp_path / "k.report.json", "--context", 128, "--max-windows", 16,
    )  # fmt: skip
    assert status == 0
    assert re.search(r"calibrated on code\.txt is fit for prose\.txt: \d+ of 24 heads go beyond", said)
    check = json.loads((tmp_path / "k.report.json").read_text())["check"]
    assert check["kl_difference"][0] <= check["kl_mean"] - check["own_kl_mean"] <= check["kl_difference"][1]
    assert check["largest_excess"] > 0.5


@pytest.mark.daily(1)
@pytest.mark.parametrize("kv", [("--kv", "int8_per_head"), ("--kv", "int4", "--centered")])
def test_what_does_not_fit_another_text_is_called_so(kvq, tmp_path, kv):
    """One letter over and over moves few channels, and its means are no other text's."""
    narrow = tmp_path / "narrow.txt"
    narrow.write_text("aaa " * 600)
    status, said, _ = kvq(
        "calibrate", "tiny", *kv, "--text", narrow, "--check", text_file(tmp_path),
        "--out", tmp_path / "k.json", "--context", 128, "--max-windows", 4,
    )  # fmt: skip
    assert status == 1
    found = re.search(r"is NOT fit for other\.txt: (\d+) of 24 heads go beyond .* \(most: ([\d.]+)x", said)
    assert int(found[1]) >= 12
    assert float(found[2]) > 1.2


def test_a_text_too_short_to_check_on_is_refused_before_anything_is_written(kvq, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("too few words")
    status, _, err = kvq("calibrate", "tiny", "--check", short, "--out", tmp_path / "k.json", *FEW)
    assert status == 2
    assert "one window needs 128" in err
    assert not (tmp_path / "k.json").exists()


def text_file(folder):
    path = folder / "other.txt"
    path.write_text(calibration_text().text[:20_000])
    return path


def test_fp8_scales_for_other_engines_hold_the_largest_of_all_heads(kvq, tmp_path):
    for name in ("scales.safetensors", "scales.json"):
        assert (
            kvq("calibrate", "tiny", "--out", tmp_path / "k.json", "--fp8-out", tmp_path / name, *FEW)[0] == 0
        )
    maxima = KVRecipe.load(tmp_path / "k.json").static_scales.layers
    tensors = load_file(tmp_path / "scales.safetensors")
    factors = json.loads((tmp_path / "scales.json").read_text())
    assert factors["model_type"] == "llama"
    assert factors["kv_cache"]["dtype"] == "float8_e4m3fn"
    assert len(tensors) == 12
    for index, layer in enumerate(maxima):
        for part in ("k", "v"):
            scale = tensors[f"model.layers.{index}.self_attn.{part}_scale"]
            assert scale.shape == (1,)
            assert scale.dtype == torch.float32
            assert scale.item() == pytest.approx(max(getattr(layer, part)) / 448)
        both = max(*layer.k, *layer.v) / 448
        assert factors["kv_cache"]["scaling_factor"]["0"][str(index)] == pytest.approx(both)


def test_an_unknown_kind_of_export_is_refused_before_any_work(kvq, tmp_path):
    status, _, err = kvq("calibrate", "no-such-model", "--out", tmp_path / "k.json", "--fp8-out", "scales.pt")
    assert status == 2
    assert "FP8 scales go into .safetensors or .json files, got scales.pt" in err


def test_json_lines_calibrate_like_the_text_they_hold(kvq, tmp_path):
    (tmp_path / "a.txt").write_text("one two three " * 60 + "\n\n" + "four five " * 60)
    lines = [{"body": "one two three " * 60}, {"body": "four five " * 60}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for name, more in (("a.txt", ()), ("a.jsonl", ("--text-field", "body"))):
        out = tmp_path / f"{name}.json"
        assert kvq("calibrate", "tiny", "--text", tmp_path / name, *more, "--out", out, *FEW)[0] == 0
    first, second = (KVRecipe.load(tmp_path / f"{name}.json").static_scales for name in ("a.txt", "a.jsonl"))
    assert first == second
    status, _, err = kvq("calibrate", "tiny", "--text", tmp_path / "a.jsonl", "--out", tmp_path / "k.json")
    assert status == 2
    assert "it has body: name one with --text-field" in err
