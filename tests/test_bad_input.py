"""More of what bad input gets: one clear line, exit code 2, nothing half-written, nothing silent."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvq
from kvq import cli
from kvq.errors import ConfigError, ModelError, RequestError
from kvq.models.describe.resolve import EMBEDDED
from tests.helpers_cli import remarks
from tests.waiting import HANG_S

SHORT = ["--context", "64", "--max-windows", "1"]


@pytest.fixture
def run(capsys):
    """Call the command line in this process; returns (exit code, stdout, stderr)."""

    def call(*args):
        with pytest.raises(SystemExit) as stop:
            cli.main([str(a) for a in args])
        out, err = capsys.readouterr()
        return stop.value.code or 0, out, err

    return call


@pytest.fixture
def edited(tmp_path):
    """A copy of the embedded model with keys of config.json (or another file) changed."""

    def make(file="config.json", **changes):
        folder = tmp_path / "edited"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(EMBEDDED["tiny"], folder)
        data = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(data | changes))
        return folder

    return make


def check_refused(result, says):
    code, out, err = result
    assert (code, out) == (2, ""), err
    assert says in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) <= 4  # click adds a usage and a hint to its own


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 5}, "says num_hidden_layers 5, but the weights hold layers 0 to 5"),
        ({"vocab_size": 40960}, "its config.json says vocab_size 40960"),
        ({"layer_types": [["a"]] * 6, "model_type": "qwen3"}, "layer kind ['a'] is not one kvq can run"),
        ({"rope_parameters": "abc"}, "rope_parameters can't be 'abc' in a llama model"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps can't be 'x' in a llama model; correct it, or drop it"),
        ({"eos_token_id": {"a": 1}}, "eos_token_id must be a token's id, 0 to 4095"),
        ({"pad_token_id": 99999}, "pad_token_id must be a token's id, 0 to 4095"),
        ({"hidden_act": "nope"}, "hidden_act can't be 'nope' in a llama model; correct it, or drop it"),
        ({"num_hidden_layers": 30_000_000}, "30000000 layers are more than the 10000"),
        ({"quantization_config": {"quant_method": "gptq"}}, "bits must be 8 or 4 or 3, got nothing"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}}, "rope_theta must be above 0"),
    ],
)
def test_odd_configs(run, edited, changes, says):
    check_refused(run("generate", "--model", edited(**changes), "hello"), says)


def test_a_number_of_5000_digits_in_a_config(run, edited):
    folder = edited()
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": ' + "9" * 5000 + "}")
    check_refused(run("inspect", "--model", folder), "is not JSON")


def test_a_tokenizer_that_does_not_load(run, edited):
    folder = edited("tokenizer.json", model={"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]})
    check_refused(run("generate", "--model", folder, "hello"), "has no tokenizer that loads")


def test_a_tokenizer_of_another_model_is_hinted_at(tiny):
    with pytest.raises(RequestError, match="if a tokenizer made it, it is not this model's"):
        tiny.logits([1, 4096])


@pytest.mark.parametrize(
    "name",
    ["", "   ", "a" * 5000, "~nosuchuser/x", "./\0"],
    ids=["empty", "blank", "long", "no user", "nul"],
)
def test_odd_model_names(run, name):
    check_refused(run("inspect", "--model", name), "model" if not name.strip() else "there is no folder")


def test_a_revision_of_something_local_is_refused_not_ignored(run):
    check_refused(
        run("inspect", "--revision", "v1"), "--revision v1 names a version on the hub, but tiny is here"
    )


@pytest.mark.parametrize("device", ["meta", "cpu:7", "tpu", ""])
def test_odd_devices(run, device):
    check_refused(run("perplexity", "--device", device, *SHORT), f"unknown device {device!r}")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--kv", ""], "unknown KV format ''"),
        pytest.param(["--kv", "int4_g٦٤"], "unknown KV format", id="digits"),
        (["--kv", "int4_g032"], "unknown KV format"),
        (["--text", ""], "can't read"),
        (["--json", ""], "it is a folder"),
        (["--json", "n" * 300], "File name too long"),
        (["--plot", "p" * 300 + ".svg"], "File name too long"),
        (["--calibrate-on-load"], "use no static scales"),
    ],
)
def test_odd_options_of_perplexity(run, args, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_refused(run("perplexity", *args, *SHORT), says)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--max-windows", "0"], "the number of windows must be at least 1"),
        (["--context", "999999"], "this model takes 2 to 4096"),
        (["--context", "0"], "0 is not in the range x>=1"),
    ],
)
def test_odd_options_of_calibrate(run, args, says, tmp_path):
    check_refused(run("calibrate", "tiny", "--out", tmp_path / "k.json", *args), says)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "says"),
    [
        pytest.param(["\udcff"], "not valid Unicode", id="surrogate"),
        (["--seed", str(1 << 70), "x"], "seed must be a whole number of -9223372036854775808 to"),
        (["--seed", str(-(1 << 70)), "x"], "seed must be a whole number of -9223372036854775808 to"),
    ],
)
def test_odd_options_of_generate(run, args, says):
    check_refused(run("generate", *args), says)


def test_a_temperature_next_to_zero_takes_the_likeliest(run):
    same = ("-n", "6", "The king")
    assert run("generate", "--temperature", "1e-320", *same)[:2] == run("generate", *same)[:2]


def test_auto_for_both_halves_is_auto(run):
    code, out, _ = run("perplexity", "-ctk", "auto", "-ctv", "auto", *SHORT)
    assert code == 0
    assert "\nfp32 " in out


@pytest.mark.parametrize("window", [16, 64])
def test_a_cut_attention_window_goes_with_every_output(run, tmp_path, window):
    outputs = ["--json", tmp_path / "r.json", "--html", tmp_path / "r.html", "--plot", tmp_path / "r.png"]
    args = ["--kv", "fp32,int4_g32", "--attention-window", window, "--instrument", *outputs]
    code, _, err = run("perplexity", *args, *SHORT)
    assert (code, remarks(err)) == (1, [])  # a 64-token window can't hurt 64 tokens of context
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [(r["kv"], r["attention_window"], r["instrument"]) for r in rows] == [
        ("fp32", window, ""), ("int4_g32", window, ""), ("fp32", 64, "window"), ("int2", window, "int2"),
    ]  # fmt: skip
    assert (tmp_path / "r.png").stat().st_size > 1000


def test_results_do_not_replace_what_is_not_a_file_and_follow_links(run, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    check_refused(run("perplexity", "--json", tmp_path / "fifo", *SHORT), "it is not a regular file")
    assert (tmp_path / "fifo").is_fifo()
    target = tmp_path / "real.json"
    target.write_text("old")
    (tmp_path / "link.json").symlink_to(target)
    assert run("perplexity", "--kv", "fp32", "--json", tmp_path / "link.json", *SHORT)[0] == 0
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads(target.read_text())["rows"]


def test_a_loss_that_no_perplexity_can_express_is_told():
    model = kvq.load("tiny")
    head = model.weights.model.lm_head
    own = head.forward
    head.forward = lambda x: own(x) * 1e6
    with pytest.raises(RequestError, match="nats a token, which no perplexity can express"):
        kvq.perplexity(model, kv="fp32", context=64, max_windows=1)


MEASURING = """
import sys
from kvq import cli
from kvq.evals.divergence import TokenFigures
take = TokenFigures.take

def told(*given):
    print("measuring", flush=True)
    return take(*given)

TokenFigures.take = told
cli.main(sys.argv[1:])
"""


@pytest.mark.long
def test_ctrl_c_ends_a_measurement_with_130_and_leaves_nothing(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", MEASURING, "perplexity", "--json", str(tmp_path / "r.json")],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells ignore it for `command &`
    )
    # Not earlier: a signal that falls into the import of a C extension may be lost.
    assert process.stdout.readline() == "measuring\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_the_library_refuses_what_it_can_not_use(tiny):
    with pytest.raises(RequestError, match="0 tokens"):
        kvq.perplexity(tiny, kv="fp32", text="")
    with pytest.raises(ConfigError, match="kv must be a format name"):
        tiny.with_kv(None)
    with pytest.raises(RequestError, match="whole numbers"):
        tiny.logits([1.5])
    with pytest.raises(RequestError, match="not valid Unicode"):
        kvq.perplexity(tiny, kv="fp32", text="\ud800" * 100)
    for options in ({"block_size": 2.5}, {"order": "block-major"}):
        with pytest.raises(ConfigError):
            kvq.load("tiny", **options)
    with pytest.raises(ModelError, match="no folder"):
        kvq.load(Path("/no/such/folder"))


def test_the_library_takes_what_people_hand_it(tiny, tmp_path):
    assert torch.equal(tiny.logits(torch.tensor([3, 4])), tiny.logits([3, 4]))
    tiny.with_kv("k8v4").recipe.save(tmp_path / "kvq.json")
    assert tiny.with_kv(tmp_path / "kvq.json").kv_bytes_per_token == 1248
    assert kvq.calibrate(tiny, "some words " * 40, context=32, max_windows=1).tokens == 32
    with_scales = kvq.load("tiny", scales=EMBEDDED["tiny"] / "kvq.json")
    assert with_scales.with_kv("int8_per_head").recipe.is_static
