"""`kvq quantize`: what it writes and says, and what it refuses before any work."""

import importlib.util
import json
import sys
from contextlib import nullcontext

import pytest
from transformers import AutoModelForCausalLM

from kvq.calib.quantize.partial import Partial
from kvq.commands.quality.quantize import _METHODS
from kvq.evals import default_text
from kvq.weights.manifest import MANIFEST, read_manifest

FEW = ("--samples", 8, "--context", 64)


@pytest.fixture
def model(two_layers):
    return two_layers


def test_a_model_is_quantized_measured_and_reported(kvq, model, tmp_path):
    held_out = tmp_path / "text.txt"
    held_out.write_text(default_text().text[:20_000])
    status, said, _ = kvq(
        "quantize", model, "--method", "gptq", "--act-order", "--out", tmp_path / "out",
        "--json", tmp_path / "r.json", "--eval", held_out, "--eval-windows", 2, *FEW,
    )  # fmt: skip
    assert status == 0
    assert "14 Linear layers" in said
    assert "calibrated on 8 samples, 512 tokens" in said
    assert "lm_head (outside the decoder layers)" in said
    assert "perplexity on text.txt" in said
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["settings"]["act_order"] == "static"
    assert report["settings"]["format"] == "int4_g128"
    assert len(report["rows"]) == 14
    assert report["rows"][0]["error_of"] == "outputs"
    assert report["bytes_after"] == sum(row["bytes_after"] for row in report["rows"])
    assert report["peak_bytes"] > 0
    assert abs(report["perplexity"]["perplexity_change"]) < 0.5


@pytest.mark.parametrize(
    ("file_format", "needed"),
    [("compressed-tensors", ()), ("autogptq", ("optimum", "gptqmodel")), ("autoawq", ("gptqmodel",))],
)
def test_what_transformers_needs_for_the_folder_is_said(kvq, model, tmp_path, file_format, needed):
    out = tmp_path / "out"
    options = ("--method", "rtn", "--bits", 4, "--format", file_format, "--out", out)
    status, said, _ = kvq("quantize", model, *options, "--json", tmp_path / "r.json")
    assert status == 0
    told = json.loads((tmp_path / "r.json").read_text())["transformers_needs"]
    assert f"transformers needs {' and '.join(told)}" in said
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    assert set(needed) <= set(told)
    if missing or not needed:  # transformers itself is the judge, here where some are not installed
        with pytest.raises((ImportError, RuntimeError), match=missing[0]) if missing else nullcontext():
            AutoModelForCausalLM.from_pretrained(out)


@pytest.mark.long
def test_a_model_is_quantized_then_tuned_then_served(kvq, tmp_path):
    """The way that docs/weights.md tells, and what is said of a recipe of the unquantized model."""
    out, own, other = tmp_path / "q", tmp_path / "own.json", tmp_path / "other.json"
    few = ("--context", 64, "--max-windows", 1, "--verify-windows", 1, "--formats", "int4")
    assert kvq("quantize", "tiny", "--method", "rtn", "--bits", 4, "--out", out)[0] == 0
    assert kvq("tune", "--model", out, "--out", own, *few)[0] == 0
    assert kvq("serve", "--check", "--model", out, "--kv", own)[0] == 0
    assert kvq("generate", "--model", out, "--kv", own, "--max-tokens", 4, "A cat")[0] == 0
    assert kvq("tune", "--model", "tiny", "--out", other, *few)[0] == 0
    status, said, _ = kvq("serve", "--check", "--model", out, "--kv", other)
    assert status != 0
    assert "was made for the unquantized model" in said
    assert f"kvq tune {out}" in said


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--method", "rtn", "--bits", "8", "--format", "autoawq"], "autoawq holds int4 weights"),
        (["--method", "gptq", "--asymmetric", "--format", "autogptq"], "autogptq holds symmetric"),
        (["--method", "gptq", "--act-order", "group"], "use --act-order static"),
        (["--method", "gptq", "--group-size", "100"], "multiple of 8, got 100"),
        (["--method", "gptq", "--group-size", "512"], "--group-size 256, 128, 64, 32, -1 fit all layers"),
        (["--method", "gptq", "--group-size", "0"], "group size must be -1"),
        (["--method", "rtn", "--act-order"], "are gptq's, got method rtn"),
        (["--method", "awq", "--alpha", "0.5"], "alpha is smoothquant's"),
        (["--method", "smoothquant", "--bits", "4"], "bits must be 8 for smoothquant"),
        (
            ["--method", "smoothquant", "--activations", "none"],
            "smoothquant makes int8 weights for int8 inputs",
        ),
        (["--method", "gptq", "--activations", "fp8"], "don't go with fp8 inputs"),
        (["--method", "rtn", "--text", __file__], "uses no text"),
        (["--method", "gptq", "--text", "missing.txt"], "can't read missing.txt"),
        (["--method", "gptq", "--eval", "missing.txt"], "can't read missing.txt"),
        (["--method", "gptq", "--damp", "0"], "damping must lie between 0 and 1"),
        (["--method", "gptq", "--format", "autogptq", "--kv-scales"], "can't hold scales of K and V"),
        (["--method", "nf4", "--bits", "4"], "takes none of kvq's options; leave out --bits"),
        (["--method", "gptq", "--json", "nowhere/r.json"], "there is no folder nowhere"),
    ],
)
def test_what_does_not_go_together_is_refused_before_any_work(kvq, model, tmp_path, options, why):
    status, _, error = kvq("quantize", model, "--out", tmp_path / "out", *options)
    assert status == 2
    assert why in " ".join(error.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "again"),
    [([], "the same command continues"), (["--restart"], "the same command without --restart continues")],
    ids=["resume", "restart"],
)
def test_an_interruption_says_how_to_go_on(kvq, model, tmp_path, monkeypatch, options, again):
    save, saved = Partial.save, []

    def interrupt(self, index, result):
        save(self, index, result)
        saved.append(index)
        if index == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(Partial, "save", interrupt)
    arguments = ("quantize", model, "--method", "rtn", "--out", tmp_path / "out")
    status, _, err = kvq(*arguments, *options)
    assert status == 130
    where = f"finished layers in {tmp_path / 'out.partial'}: 1; {again} from there"
    assert where in " ".join(err.split())
    status, _, err = kvq(*arguments)
    assert status == 0
    assert "kvq: finished layers of an earlier run: 1" in err
    assert saved == [0, 1]


def test_a_folder_that_is_not_empty_is_left_alone(kvq, model, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").write_text("mine")
    for options in ([], ["--overwrite"]):
        status, _, error = kvq("quantize", model, "--method", "rtn", "--out", tmp_path / "out", *options)
        assert status == 2
        assert "name a new folder" in error
    assert (tmp_path / "out" / "notes").read_text() == "mine"


def test_a_folder_that_kvq_wrote_is_replaced_if_asked(kvq, model, tmp_path):
    for bits, options in ((8, []), (4, ["--overwrite"])):
        out = tmp_path / "out"
        assert kvq("quantize", model, "--method", "rtn", "--bits", bits, "--out", out, *options)[0] == 0
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["num_bits"] == 4


def test_every_method_is_named_as_it_is_known(kvq):
    from kvq.calib.quantize.settings import METHODS

    assert set(_METHODS) == set(METHODS)
    status, said, _ = kvq("quantize", "--help")
    assert status == 0
    assert "--group-size" in said


@pytest.mark.parametrize("method", ["nf4", "int8-bnb"])
def test_bitsandbytes_writes_its_own_formats(kvq, model, tmp_path, method):
    pytest.importorskip("bitsandbytes")
    status, said, error = kvq(
        "quantize", model, "--method", method, "--out", tmp_path / "out", "--device", "cpu"
    )
    assert status == 0, error
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "bitsandbytes"
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1, "all as the umask says"
    files = read_manifest(tmp_path / "out")
    assert set(files) == {path.name for path in (tmp_path / "out").iterdir()} - {MANIFEST}
    assert "where bitsandbytes and accelerate are installed (pip install bitsandbytes accelerate)" in said
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_without_bitsandbytes_its_methods_say_how_to_get_it(kvq, model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    status, _, error = kvq("quantize", model, "--method", "nf4", "--out", tmp_path / "out")
    assert status == 2
    assert "pip install '.[bnb]'" in error


def test_a_gguf_file_is_written_measured_and_reported(kvq, model, tmp_path):
    out = tmp_path / "a.gguf"
    held_out = tmp_path / "text.txt"
    held_out.write_text(default_text().text[:20_000])
    status, said, _ = kvq(
        "quantize", model, "--format", "gguf", "--type", "q5_k", "--out", out, "--json", tmp_path / "r.json",
        "--eval", held_out, "--eval-windows", 1,
    )  # fmt: skip
    assert status == 0
    assert f"wrote {out}: 15 tensors" in said
    assert "kvq and llama.cpp load it as it is" in said
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["settings"]["method"] == "rtn"
    assert report["settings"]["format"] == "Q5_K_M"
    assert (
        report["rows"][0] | {"module": "model.layers.0.self_attn.q_proj", "format": "Q5_K"}
        == report["rows"][0]
    )
    assert report["rows"][-1]["module"] == "model.embed_tokens"
    assert abs(report["perplexity"]["perplexity_change"]) < 0.05


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--format", "gguf", "--method", "awq"), "leave out --method"),
        (("--format", "gguf", "--text", __file__), "--text names one; drop it"),
        (("--format", "gguf", "--bits", 4), "leave out --bits"),
        (("--type", "Q8_0"), "--type names types of GGUF files"),
    ],
)
def test_what_does_not_go_with_gguf_is_refused(kvq, model, tmp_path, given, message):
    status, _, error = kvq("quantize", model, "--out", tmp_path / "a.gguf", *given)
    assert status == 2
    assert message in error
