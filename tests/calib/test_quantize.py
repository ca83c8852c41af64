"""Quantizing a model layer by layer: what is written, what is refused, and that a killed run goes on."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import kvq
from kvq.calib.quantize.partial import Partial
from kvq.calib.quantize.settings import QuantizeSettings
from kvq.calib.quantize.walk import Walk, draw_samples
from kvq.errors import ConfigError, ModelError, RequestError
from kvq.evals import calibration_text
from kvq.models.describe.resolve import EMBEDDED
from tests.helpers_models import (
    eager_logits,
    load_eager,
    load_fp32,
    random_tokens,
    save_model,
)
from tests.waiting import HANG_S

TEXT = calibration_text().text
FEW = {"samples": 8, "context": 64, "text": TEXT[:8_000]}


@pytest.fixture
def random_model(tmp_path, two_layers):
    """A random model of a family, in a folder with a tokenizer whose ids it knows."""

    def make(family, **changes):
        folder = save_model(tmp_path / family, family, **({"vocab_size": 4096} | changes))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((two_layers / name).read_bytes())
        return folder

    return make


def logits(folder, ids=range(3, 40)):
    return kvq.load(folder, kv="fp32", device="cpu").logits(list(ids))


@pytest.mark.daily(4)
@pytest.mark.parametrize(
    ("method", "options", "limit"),
    [
        ("rtn", {"bits": 8}, 0.02),
        ("fp8", {}, 0.08),
        ("gptq", {}, 0.25),
        ("gptq", {"act_order": "static", "symmetric": False}, 0.25),
        ("gptq", {"activations": "int8"}, 0.25),
        ("awq", {}, 0.25),
        ("awq", {"bits": 3, "group_size": 64}, 0.5),
        ("smoothquant", {}, 0.03),
    ],
)
def test_every_method_writes_a_folder_that_loads_and_is_near_the_model(
    two_layers, tmp_path, method, options, limit
):
    given = options | ({} if method in ("rtn", "fp8") else FEW)
    done = kvq.quantize(two_layers, tmp_path / "out", method, **given)
    assert len(done.rows) == 14
    assert all(0 < row.relative_error < 0.4 for row in done.rows)
    assert done.bytes_after < 0.6 * done.bytes_before
    assert "lm_head" in done.ignored
    wanted, found = logits(two_layers), logits(tmp_path / "out")
    assert (found - wanted).norm() < limit * wanted.norm()
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    ("file_format", "options"),
    [("autogptq", {"act_order": "group"}), ("autogptq", {}), ("autoawq", {"symmetric": False})],
)
def test_other_formats_hold_the_same_weights(two_layers, tmp_path, file_format, options):
    kvq.quantize(two_layers, tmp_path / "out", file_format=file_format, dtype="fp16", **options, **FEW)
    wanted, found = logits(two_layers), logits(tmp_path / "out")
    assert (found - wanted).norm() < 0.25 * wanted.norm()


def test_what_is_not_quantized_is_there_bit_for_bit(two_layers, tmp_path):
    kvq.quantize(two_layers, tmp_path / "out", "gptq", **FEW)
    before, after = (
        load_file(two_layers / "model.safetensors"),
        load_file(tmp_path / "out" / "model.safetensors"),
    )
    kept = {name for name in before if "_proj." not in name}
    assert len(kept) > 3
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_gptq_changes_outputs_less_than_rounding(two_layers, tmp_path):
    wanted, errors = logits(two_layers), {}
    for method in ("rtn", "gptq", "awq"):
        given = {} if method == "rtn" else {"samples": 16, "context": 256, "text": TEXT[:40_000]}
        kvq.quantize(two_layers, tmp_path / method, method, bits=3, **given)
        errors[method] = float((logits(tmp_path / method) - wanted).norm())
    assert errors["gptq"] < 0.8 * errors["rtn"]
    assert errors["awq"] < 0.85 * errors["rtn"]


FAMILIES = (
    "gemma3_text",
    "phi3",
    "starcoder2",
    "olmo2",
    "qwen3",
    "gpt_neox",
    "cohere2",
    "mixtral",
    "gpt_oss",
)
# Families differ in what scales fold into; GPTQ needs the walk alone, which AWQ takes too.
ALSO_GPTQ = ("phi3", "gpt_neox", "mixtral")


@pytest.mark.daily(4)
@pytest.mark.parametrize(
    ("family", "method"),
    [
        *((family, "awq") for family in FAMILIES),
        *((family, "gptq") for family in ALSO_GPTQ),
        *(pytest.param(x, "gptq", marks=pytest.mark.long) for x in FAMILIES if x not in ALSO_GPTQ),
    ],
)
def test_families_are_walked_as_transformers_runs_them(random_model, tmp_path, family, method):
    folder = random_model(family)
    done = kvq.quantize(folder, tmp_path / "out", method, bits=8, group_size=8, **FEW)
    assert all(row.relative_error < 0.02 for row in done.rows)
    wanted, found = logits(folder), logits(tmp_path / "out")
    has_experts = family in ("mixtral", "gpt_oss")  # whose choice may change
    assert (found - wanted).norm() < (0.3 if has_experts else 0.05) * wanted.norm()
    left = any("experts in one" in why for why in done.ignored.values())
    assert left == (has_experts and (method == "awq" or family == "gpt_oss"))
    assert has_experts == any(why == "a router" for why in done.ignored.values())
    assert any("experts.3.w2" in row.module or "experts.3.down" in row.module for row in done.rows) == (
        has_experts and not left
    )


@pytest.mark.parametrize("family", ["gemma2", "qwen2", "mistral"])
def test_hidden_states_after_the_last_layer_are_the_models(tmp_path, family):
    reference = load_eager(save_model(tmp_path / "model", family))
    ids = random_tokens(40, seed=3)
    wanted = reference.base_model(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True)
    walk = Walk(reference, [ids, ids], torch.device("cpu"))
    for index in range(len(walk.layers)):
        walk.advance(index)
    with torch.no_grad():
        found = reference.base_model.norm(walk.hidden[1][None])
    assert torch.allclose(found, wanted.last_hidden_state, atol=1e-5)
    assert eager_logits(reference, ids).isfinite().all()


@pytest.mark.parametrize(
    ("option", "allowed"),
    [
        ("method", "rtn, gptq, awq, smoothquant"),
        ("act_order", "none, static, group"),
        ("scale_search", "off, squares, weighted"),
    ],
)
def test_an_unknown_word_is_refused_with_those_allowed(option, allowed):
    with pytest.raises(ConfigError, match=f"{allowed}.*'x'|'x'.*{allowed}"):
        QuantizeSettings(**({"method": "gptq"} | {option: "x"}))


def test_models_without_linear_layers_are_refused_by_name(random_model, tmp_path):
    with pytest.raises(ModelError, match="gpt2 has no Linear layers"):
        kvq.quantize(random_model("gpt2"), tmp_path / "out", "rtn")


def test_groups_that_do_not_fit_name_the_layers_and_what_fits(random_model, tmp_path):
    folder = random_model("llama")
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.down_proj \(80\).*--group-size 16, 8, -1 fit"):
        kvq.quantize(folder, tmp_path / "out", "rtn", group_size=32)
    assert list(tmp_path.glob("out*")) == []


def test_a_quantized_model_is_not_quantized_again(two_layers, tmp_path):
    kvq.quantize(two_layers, tmp_path / "out", "rtn")
    with pytest.raises(ModelError, match="quantized already"):
        kvq.quantize(tmp_path / "out", tmp_path / "again", "rtn")


def test_activations_that_overflow_name_the_layer(two_layers, tmp_path):
    folder = tmp_path / "bad"
    folder.mkdir()
    for path in two_layers.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0] = 3e38
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(RequestError, match=r"model\.layers\.1\.mlp\.down_proj hold NaN"):
        kvq.quantize(folder, tmp_path / "out", "gptq", **FEW)


def test_samples_are_drawn_by_seed_and_a_short_text_says_what_it_lacks():
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED["tiny"])
    text = TEXT[:60_000]
    drawn = [
        draw_samples(tokenizer, text, samples=16, context=128, max_context=4096, seed=seed)
        for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert {len(ids) for ids in drawn[0]} == {128}
    some = draw_samples(tokenizer, text[:40_000], samples=1024, context=512, max_context=4096, seed=0)
    assert 8 <= len(some) < 1024
    with pytest.raises(
        RequestError, match=r"8 samples of 2,048 need 16,384: give a longer text, or --context"
    ):
        draw_samples(tokenizer, text[:20_000], samples=128, context=None, max_context=4096, seed=0)
    with pytest.raises(RequestError, match="this model takes 2 to 4096"):
        draw_samples(tokenizer, text, samples=128, context=5000, max_context=4096, seed=0)


def test_scales_of_k_and_v_are_written_beside_the_weights(two_layers, tmp_path):
    out = tmp_path / "out"
    kvq.quantize(two_layers, out, "rtn", kv_scales=True, text=TEXT[:20_000])
    tensors = load_file(out / "model.safetensors")
    assert tensors["model.layers.1.self_attn.k_scale"].item() > 0
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8
    found = kvq.load(out, kv="fp8_per_head", device="cpu").logits([3, 4, 5])
    assert torch.isfinite(found).all()


def assert_same_files(found: Path, wanted: Path) -> None:
    assert {path.name for path in found.iterdir()} == {path.name for path in wanted.iterdir()}
    for path in wanted.iterdir():
        assert (found / path.name).read_bytes() == path.read_bytes()


@pytest.mark.daily(2)
@pytest.mark.parametrize("method", ["gptq", "awq", "smoothquant", "rtn"])
def test_a_run_cut_off_between_layers_goes_on_to_the_same_bytes(random_model, tmp_path, monkeypatch, method):
    model, whole, cut = random_model("qwen2"), tmp_path / "whole", tmp_path / "cut"
    options = {} if method == "smoothquant" else {"group_size": 8}
    options |= {} if method == "rtn" else FEW
    kvq.quantize(model, whole, method, **options)
    save, saved = Partial.save, []

    def save_two(partial, index, result):
        if index == 2:
            raise KeyboardInterrupt
        saved.append(index)
        save(partial, index, result)

    monkeypatch.setattr(Partial, "save", save_two)
    with pytest.raises(KeyboardInterrupt):
        kvq.quantize(model, cut, method, **options)
    assert not cut.exists()
    monkeypatch.setattr(Partial, "save", lambda *given: (saved.append(given[1]), save(*given)))
    kvq.quantize(model, cut, method, **options)
    assert saved == [0, 1, 2]
    assert_same_files(cut, whole)


SCRIPT = "import sys, kvq; kvq.quantize('tiny', sys.argv[1], sys.argv[2], samples=8, context=128)"
KILLED = """
import os, signal, sys
import kvq
from kvq.calib.quantize.partial import Partial
save = Partial.save
def save_and_die(partial, index, result):
    save(partial, index, result)
    if index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
Partial.save = save_and_die
kvq.quantize(sys.argv[1], sys.argv[2], 'rtn', group_size=8)
"""
# Ended in the middle of its third layer, by its own processor time.
CUT = SCRIPT.replace(
    "import sys, kvq; ",
    """
import signal, sys, kvq
from kvq.calib.quantize.partial import Partial
save = Partial.save
def save_and_go_on(partial, index, result):
    save(partial, index, result)
    if index == 1:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.02)
Partial.save = save_and_go_on
""",
)


@pytest.mark.long
def test_a_killed_process_leaves_its_layers_to_the_next(random_model, tmp_path):
    model, whole, cut = random_model("qwen2"), tmp_path / "whole", tmp_path / "cut"
    killed = subprocess.run([sys.executable, "-c", KILLED, model, cut], timeout=HANG_S)
    assert killed.returncode == -signal.SIGKILL
    assert not cut.exists()
    assert len(list((tmp_path / "cut.partial").glob("layer-*"))) == 2
    kvq.quantize(model, cut, "rtn", group_size=8)
    kvq.quantize(model, whole, "rtn", group_size=8)
    assert_same_files(cut, whole)


@pytest.mark.long
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_run_killed_in_the_middle_goes_on_to_the_same_bytes(tmp_path, method):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", SCRIPT, whole, method], check=True, env=environment, timeout=HANG_S)
    killed = subprocess.run([sys.executable, "-c", CUT, cut, method], env=environment, timeout=HANG_S)
    assert killed.returncode == -signal.SIGVTALRM
    assert not cut.exists()
    assert len(list((tmp_path / "cut.partial").glob("layer-*"))) == 2
    subprocess.run([sys.executable, "-c", SCRIPT, cut, method], check=True, env=environment, timeout=HANG_S)
    assert_same_files(cut, whole)


def test_other_settings_do_not_go_on_with_what_was_begun(two_layers, tmp_path, monkeypatch):
    from kvq.calib.quantize import run

    def fail(*_, **__):
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(run, "write_checkpoint", fail)
        with pytest.raises(KeyboardInterrupt):
            kvq.quantize(two_layers, out, "gptq", **FEW)
    with monkeypatch.context() as patched:
        patched.setattr(run, "load_plain", fail)  # it is refused before the weights are loaded
        with pytest.raises(
            ConfigError, match=r"begun otherwise \(format 'int4_g128', now 'int3_g128'\).*--restart"
        ):
            kvq.quantize(two_layers, out, "gptq", bits=3, **FEW)
    kvq.quantize(two_layers, out, "gptq", bits=3, restart=True, **FEW)
    assert load_fp32(out) is not None


def test_two_runs_do_not_write_one_folder(two_layers, tmp_path):
    folder = tmp_path / "out.partial"
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(ConfigError, match="another kvq quantize is writing"):
            kvq.quantize(two_layers, tmp_path / "out", method="rtn")
    finally:
        os.close(descriptor)
    kvq.quantize(two_layers, tmp_path / "out", method="rtn")
    assert not folder.exists()


def test_what_transformers_refuses_is_noted(two_layers, tmp_path):
    done = kvq.quantize(two_layers, tmp_path / "out", method="rtn", bits=4, symmetric=False)
    assert any("zero points" in note for note in done.notes)
