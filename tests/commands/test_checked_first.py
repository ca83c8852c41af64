"""What can be checked without weights is refused before these are read: here they are all NaN."""

import io
import json
import shutil
import sys

import pytest

from kvq.models.describe.resolve import EMBEDDED

DAMAGED = "NaN or infinity"
FEW = ("--context", 80, "--max-windows", 1)
COMMANDS = {
    "perplexity": ("--model", "M", *FEW),
    "eval": ("--model", "M", "--tasks", "kl", *FEW),
    "generate": ("--model", "M", "A cat"),
    "chat": ("--model", "M"),
    "tune": ("M", "--out", "new.json", *FEW),
    "calibrate": ("M", "--out", "new.json", *FEW),
    "quantize": ("M", "--method", "gptq", "--out", "new"),
    "serve": ("--model", "M", "--check", "--port", 0),
    "run-batch": ("--model", "M", "requests.jsonl", "answers.jsonl"),
    "bench engine": ("--model", "M", "--requests", 1, "--input-len", 8, "--output-len", 2, "--repeats", 1),
}
LOADS = [name for name in COMMANDS if name != "serve"]  # --check reads no weights
KV = [name for name in COMMANDS if name not in ("tune", "quantize", "run-batch")]  # a batch takes a process
SEVERAL = ["perplexity", "eval", "bench engine"]  # formats at once


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """The embedded model, every byte of its weights 0xFF."""
    folder = tmp_path_factory.mktemp("models") / "damaged"
    shutil.copytree(EMBEDDED["tiny"], folder, ignore=shutil.ignore_patterns("kvq.json"))
    weights = folder / "model.safetensors"
    stored = bytearray(weights.read_bytes())
    header = 8 + int.from_bytes(stored[:8], "little")
    stored[header:] = b"\xff" * (len(stored) - header)
    weights.write_bytes(stored)
    return folder


@pytest.fixture
def ask(kvq, damaged, tmp_path, monkeypatch):
    """Run a command on that model in a folder that must not change: what it says when it is refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    body = {"model": "damaged", "prompt": "A cat", "max_tokens": 2}
    request = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "requests.jsonl").write_text(json.dumps(request))
    shutil.copy(EMBEDDED["tiny"] / "kvq.json", tmp_path / "other.json")
    before = sorted(tmp_path.iterdir())

    def run(command, *options):
        line = (damaged if word == "M" else word for word in COMMANDS[command])
        status, out, err = kvq(*command.split(), *line, *options)
        assert status != 0
        assert sorted(tmp_path.iterdir()) == before
        return " ".join((out + err).split())

    return run


@pytest.mark.daily(4)
@pytest.mark.parametrize("command", LOADS)
def test_commands_fail_at_such_weights_once_they_read_them(ask, command):
    assert DAMAGED in ask(command)


@pytest.mark.parametrize("command", [*KV, "tune"])
def test_unknown_formats(ask, command):
    said = ask(command, "--formats" if command == "tune" else "--kv", "int9")
    assert "did you mean 'int8'" in said
    assert DAMAGED not in said


@pytest.mark.parametrize("command", KV)
def test_formats_that_do_not_fit_the_heads(ask, command):
    said = ask(command, "--kv", "int4_g128")
    assert "group size must divide head_dim/2" in said
    assert DAMAGED not in said


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "bench engine"])
def test_a_cache_that_the_engine_does_not_run_over(ask, command):
    said = ask(command, "--kv", "bf16", "--cache", "dense")
    assert "the engine runs over kvq's own cache, not 'dense'" in said
    assert DAMAGED not in said


@pytest.mark.parametrize("command", SEVERAL)
def test_beside_formats_that_fit_those_that_do_not_are_left_out(ask, command):
    said = ask(command, "--kv", "int4_g128,int8")
    assert "kvq: left out: int4_g128 does not fit this model" in said
    assert DAMAGED in said, "the other one runs"


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (command, options)
        for command in KV
        if command != "calibrate"
        for options in [("--kv", "other.json"), ("--kv", "int8_per_head", "--scales", "other.json")]
    ]
    + [("run-batch", ("--kv", "other.json"))],
)
def test_recipes_and_scales_of_another_model(ask, command, options):
    said = ask(command, *options)
    assert "other.json: these" in said
    assert "another model" in said
    assert DAMAGED not in said


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("perplexity", "--json"), ("perplexity", "--plot"), ("eval", "--json"), ("tune", "--out"),
        ("tune", "--json"), ("tune", "--plot"), ("calibrate", "--out"), ("calibrate", "--json"),
        ("quantize", "--out"), ("quantize", "--json"), ("bench engine", "--json"), ("bench engine", "--plot"),
    ],
)  # fmt: skip
def test_outputs_that_can_not_be_written(ask, command, option):
    said = ask(command, option, "nowhere/out.svg")
    assert "there is no folder nowhere" in said
    assert DAMAGED not in said


def test_a_batch_whose_answers_have_no_folder(ask, monkeypatch):
    monkeypatch.setitem(COMMANDS, "run-batch", ("--model", "M", "requests.jsonl", "nowhere/answers.jsonl"))
    said = ask("run-batch")
    assert "there is no folder nowhere" in said
    assert DAMAGED not in said


@pytest.mark.parametrize(
    ("command", "options", "why"),
    [
        ("eval", ("--tasks", "generatoin"), "did you mean 'generation'"),
        ("eval", ("--gate", "kl_meen<1"), "did you mean 'kl_mean'"),
        ("eval", ("--gate", "generation.identical>0.5"), "add generation to --tasks"),
        ("quantize", ("--group-size", 7), "group size"),
        ("quantize", ("--text", "missing.txt"), "can't read missing.txt"),
        ("quantize", ("--eval", "missing.txt"), "can't read missing.txt"),
        ("serve", ("--tool-call-parser", "hermez"), "hermes"),
        ("serve", ("--api-key-file", "missing"), "missing"),
        ("serve", ("--ssl-keyfile", "missing"), "can't read missing"),
        ("serve", ("--kv-memory", "1KiB"), "one block of every layer group takes"),
        ("serve", ("--max-model-len", 10**6), "takes 1 to 4096"),
        ("bench engine", ("--rivals", "vlm"), "vlm"),
        ("bench engine", ("--input-len", 10**6), "context"),
        ("bench engine", ("--rate", 1, "--concurrency", 1), "give one of them"),
        ("generate", ("--backend", "triton"), "triton"),
        ("generate", ("--dtype", "int3"), "int3"),
        ("generate", ("--regex", "("), "regex"),
        ("generate", ("--max-tokens", 10**6), "context of 4096"),
        ("chat", ("--weights", "int9"), "int9"),
        ("chat", ("--temperature", -1), "temperature"),
    ],
)
def test_options_that_can_not_be_used(ask, command, options, why):
    said = ask(command, *options)
    assert why in said
    assert DAMAGED not in said
