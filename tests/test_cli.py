"""The command line: what people type, what they read, and what bad input gets."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvq import cli
from kvq.kernels import Device, registered
from kvq.kernels.gpu import support
from kvq.models.describe.resolve import EMBEDDED
from tests.helpers_cli import remarks
from tests.waiting import HANG_S

SHORT = ["--context", "64", "--max-windows", "1"]
HEAVIER = {"torch", "transformers", "numpy", "safetensors", "rich", "asyncio", "fastapi", "yaml"}


@pytest.fixture
def run(capsys):
    """Call the command line in this process; returns (exit code, stdout, stderr)."""

    def call(*args):
        code = 0
        try:
            cli.main([str(a) for a in args])
        except SystemExit as stop:
            code = stop.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the embedded model's folder that a test may damage."""

    def make(name="model"):
        folder = tmp_path_factory.mktemp("models") / name
        shutil.copytree(EMBEDDED["tiny"], folder)
        return folder

    return make


def imported_by(*arguments):
    """Every module that an interpreter called so imports, as `-X importtime` tells."""
    command = [sys.executable, "-X", "importtime", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG_S)
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}, done.stdout


def processor_s(*arguments):
    """Seconds of processor time that an interpreter called so takes from its start to its end."""
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return used.ru_utime + used.ru_stime


def test_help_names_every_command_and_imports_next_to_nothing():
    nothing, _ = imported_by("-c", "pass")
    modules, shown = imported_by("-m", "kvq", "--help")
    for name in cli._COMMANDS:
        assert re.search(rf"^  {name} ", shown, re.M)
    assert "kvq.cli" in modules
    assert not {name.partition(".")[0] for name in modules} & HEAVIER
    assert len(modules - nothing) < 150  # 106 with click 8


def test_help_takes_little_more_processor_time_than_click_itself():
    """Seconds on a clock would say how busy the machine is, and an empty program is all caches on some: help
    took 2.4 times of one, and 6.5. Of a program that imports click it takes 1.5 times.
    """
    pairs = [(processor_s("-c", "import click"), processor_s("-m", "kvq", "--help")) for _ in range(5)]
    plain, helped = (min(column) for column in zip(*pairs, strict=True))
    assert helped < 2 * plain


@pytest.mark.parametrize("name", list(cli._COMMANDS))
def test_every_command_explains_itself(run, name):
    code, out, _ = run(name, "--help")
    assert code == 0
    assert "Usage: kvq " + name in out


def test_perplexity_prints_a_table_and_writes_json_plot_and_report(run, tmp_path):
    paths = [tmp_path / name for name in ("r.json", "r.svg", "r.html")]
    code, out, err = run(
        "perplexity",
        "--kv",
        "fp32,fp8_per_head,int4",
        *SHORT,
        "--json",
        paths[0],
        "--plot",
        paths[1],
        "--html",
        paths[2],
    )
    assert (code, remarks(err)) == (0, [])
    assert re.search(r"^int4 +4\.625 +[\d.]+ +888 +3\.46x", out, re.M)
    result = json.loads(paths[0].read_text())
    assert {"kvq_version", "commit", "date", "device", "versions", "command", "rows"} <= set(result)
    assert [row["kv"] for row in result["rows"]] == ["fp32", "fp8_per_head", "int4"]
    assert result["rows"][0]["tokens"] == 63
    assert len(result["text_digest"]) == 64
    assert paths[1].read_text().lstrip().startswith("<?xml")
    page = paths[2].read_text()
    assert "<svg" in page
    assert not re.search(r"(src|href)=.https?://", page)


def test_familiar_spellings_work_and_say_what_they_became(run):
    code, out, err = run("perplexity", "--kv-cache-dtype", "f16,q8_0", *SHORT)
    assert code == 0
    assert "q8_0 is read as kvq's int8" in err
    assert re.search(r"^q8_0 +8\.375", out, re.M)
    code, out, err = run("perplexity", "-ctk", "q8_0", "-ctv", "q4_0", *SHORT)
    assert code == 0
    assert re.search(r"^q8_0/q4_0 +6\.75", out, re.M)
    assert "q4_0 is read as kvq's int4_g32" in err


@pytest.mark.parametrize("how", ["ngram,k=3", "self", "draft,model=tiny-draft,adapts=false"])
def test_generate_says_the_same_with_drafts(run, how):
    args = ("generate", "--kv", "fp32", "-n", "40", "--ignore-eos", "One two three, one two three, one two")
    assert run(*args, "--speculation", how)[:2] == run(*args)[:2]


def test_generate_streams_the_same_text_from_fp32_blocks_as_transformers(run, tiny):
    import torch

    prompt = "The king of France"
    code, out, _ = run("generate", "--kv", "fp32", "-n", "24", "--ignore-eos", prompt)
    ids = tiny.tokenizer(prompt, return_tensors="pt")["input_ids"]
    hf = tiny.weights.model
    hf.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            expected = hf.generate(ids, max_new_tokens=24, min_new_tokens=24, do_sample=False)
    finally:
        hf.set_attn_implementation("kvq")
    assert code == 0
    assert out == tiny.tokenizer.decode(expected[0]) + "\n"


def test_a_seed_makes_sampling_repeatable(run):
    args = ("generate", "--kv", "int4", "-n", "12", "--temperature", "1.2", "--top-p", "0.9", "A story")
    outputs = [run(*args, "--seed", seed)[1] for seed in (1, 1, 2)]
    assert outputs[0] == outputs[1] != outputs[2]


def test_inspect_counts_bytes_and_reads_no_weights(run, copy, tmp_path):
    folder = copy()
    (folder / "model.safetensors").unlink()
    code, out, _ = run("inspect", "--model", folder, "--kv", "k8v4", "--json", tmp_path / "i.json")
    assert code == 0
    row = json.loads((tmp_path / "i.json").read_text())["rows"][0]
    k8v4 = next(f for f in row["formats"] if f["kv"] == "k8v4")
    assert (k8v4["bits_per_element"], k8v4["kv_bytes_per_token"]) == (6.5, 1248)
    assert row["layers"][0] == {
        "index": 0, "number": 0, "kind": "full", "kv_heads": 2, "head_dim": 64, "v_head_dim": 64,
        "window": None, "readers": [],
    }  # fmt: skip
    assert "does not fit: int4_g128" in out
    names = {f["kv"]: f["k"] for f in row["formats"] if "k" in f}
    assert (names["int4"], names["int2"]) == ("int4_per_channel", "int2_per_channel")
    assert {"int3", "int5", "int6", "int4_g64_rot", "int2_g32_rot"} <= set(names)
    assert "what int4 was is int4_g32_s8_rot/int4_g32_s8_rot" in " ".join(out.split())


def test_inspect_says_what_keeps_a_checkpoint_from_loading(run, copy):
    folder = copy()
    assert "does not load" not in run("inspect", folder)[2]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}})
    )
    code, out, err = run("inspect", folder)
    assert (code, "bytes/token" in out) == (0, True)
    assert "warning: config.json's quantization_config: these weights are of quant_method 'mxfp4'" in err


def test_inspect_lays_out_means_and_the_groups_of_what_waits(run, tmp_path):
    name = "int3_mean+recent=64+sinks=4"
    code, out, _ = run("inspect", "--kv", name, "--json", tmp_path / "i.json")
    assert code == 0
    row = json.loads((tmp_path / "i.json").read_text())["rows"][0]
    assert [group["group"] for group in row["layout"]] == ["full", "recent-96", "sinks-32"]
    sealed, recent, sinks = row["layout"]
    assert sealed["regions"]["k_means"] == {"offset": sealed["regions"]["k_means"]["offset"]} | {
        "row_bytes": 34, "nbytes": 68,  # 64 nibbles with a scale and a minimum, for 2 heads
    }  # fmt: skip
    assert recent["layer_bytes"] == sinks["layer_bytes"] == 2 * 32 * 2 * 2 * 64  # bf16
    shown = next(f for f in row["formats"] if f["kv"] == name)
    assert shown["block_bytes"] == sealed["block_bytes"] == shown["kv_bytes_per_token"] * 32
    assert shown["bits_per_element"] == 3.5 + 8 * 34 / (32 * 64)
    assert "recent-96: 6 layers" in out


def test_foreign_spellings_are_noted_before_what_stays_unquantized(run, tmp_path):
    code, _, err = run("inspect", "--kv", "q8_0/int4+recent=8")
    assert code == 0
    assert "q8_0 is read as kvq's int8" in err
    code, _, err = run("inspect", "--kv", "int4+recents=8")
    assert code != 0
    assert "after formats come +sinks=N and +recent=N" in err


def test_what_names_meant_before_is_told_by_inspect_and_in_no_help(run):
    told = "what int4 was is int4_g32_s8_rot/int4_g32_s8_rot"
    for command, is_told in (("serve --help", False), ("perplexity --help", False), ("inspect", True)):
        code, out, _ = run(*command.split())
        assert code == 0
        assert (told in " ".join(out.split())) == is_told


def test_doctor_says_what_runs_and_why_the_rest_does_not(run):
    code, out, _ = run("doctor")
    assert code == 0
    assert re.search(r"reference +runs here: write_kv, attend", out)
    assert re.search(r"triton +does not run: .*", out)
    assert re.search(r"cpu +runs here: write_kv, attend, .* \((avx512vnni|avx512|avx2|portable)\)", out)


def test_doctor_finds_every_operation_of_a_gpu(run, monkeypatch):
    h200 = Device(type="cuda", name="H200", capability=(9, 0))
    monkeypatch.setattr(Device, "of", classmethod(lambda cls, _: h200))
    monkeypatch.setattr(support, "_has_triton", lambda: True)
    code, out, _ = run("doctor")
    assert code == 0
    [ran] = re.findall(r"triton +runs here: (.*)", out)
    assert {*registered("triton"), "linear_w4", "linear_w8"} == set(ran.split(", "))


def test_calibrate_writes_a_recipe_that_serves_static_formats(run, tmp_path):
    out = tmp_path / "kvq.json"
    code, said, _ = run("calibrate", "tiny", "--out", out, "--context", "64", "--max-windows", "2")
    assert code == 0
    assert "128 tokens" in said
    code, table, _ = run("perplexity", "--kv", f"fp32,int8_per_head,{out}", "--scales", out, *SHORT)
    assert code == 0
    assert "int8_per_head" in table


BAD_FORMATS = [
    ("int9", "unknown KV format 'int9'; did you mean 'int"),
    (
        "int4_g48",
        "group size must divide head_dim/2 or equal head_dim=64, got 48; use one of [4, 8, 16, 32, 64]",
    ),
    ("fp32,,int4", "unknown KV format ''"),
    ("no/such.json", "can't read no/such.json"),
]


@pytest.mark.parametrize(("kv", "says"), BAD_FORMATS)
def test_formats_that_do_not_exist_or_fit_are_refused_with_what_does(run, kv, says):
    code, out, err = run("perplexity", "--kv", kv, *SHORT)
    assert (code, out) == (2, "")
    assert says in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["perplexity", "--model", "no/such/folder/x"], "there is no folder no/such/folder/x"),
        (["perplexity", "--model", "tinny"], "did you mean 'tiny'?"),
        (["perplexity", "--context", "9999"], "--context 9999 is beyond this model's context of 4096"),
        (["perplexity", "--context", "1"], "at least 2 tokens"),
        (["perplexity", "--text", "missing.txt"], "can't read missing.txt"),
        (["perplexity", "--json", "no/folder/r.json"], "there is no folder no/folder"),
        (["perplexity", "--plot", "r.gif"], "the name must end in .svg, .png, .pdf"),
        (["perplexity", "--device", "cuda:99"], "device 'cuda:99' is not usable here"),
        (["perplexity", "--dtype", "fp33"], "'fp33' is not one of 'auto', 'fp32', 'bf16', 'fp16'."),
        (["perplexity", "--backend", "trition"], "did you mean 'triton'?"),
        (["perplexity", "--backend", "triton"], "triton: needs an nvidia or amd gpu, not cpu"),
        (["perplexity", "--kv", "int8", "-ctk", "int8"], "give one of them"),
        (["perplexity", "--kv", "int4", "--scales", "kvq.json"], "kvq.json"),
        (["perplexity", "--max-model-len", "99999"], "this model takes 1 to 4096"),
        (["generate", "--kv", "int8,int4", "hello"], "one KV format is needed"),
        (["generate", ""], "the prompt is empty"),
        (["generate", "--speculation", "guess", "hello"], "speculation has no method 'guess'"),
        (["generate", "--speculation", "draft", "hello"], "needs one: draft,model=FOLDER"),
        (["generate", "--speculation", "heads", "hello"], "multi-token-prediction"),
        (["generate", "-n", "5000", "hello"], "more than the context of 4096 tokens"),
        (["generate", "--temperature", "-1", "hello"], "temperature must be a number of 0 to 10"),
        (["inspect", "--kv", "int7"], "unknown KV format 'int7'"),
        (["calibrate", "tiny", "--out", "/no/folder/kvq.json"], "there is no folder /no/folder"),
        (["perplxity"], "did you mean 'perplexity'?"),
        (["perplexity", "--no-such-option"], "No such option"),
    ],
)
def test_bad_requests_say_what_was_given_and_what_to_do(run, args, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*args, *([] if "--context" in args or args[0] != "perplexity" else SHORT))
    assert (code, out) == (2, "")
    assert says.lower() in err.lower()
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "is empty"), (b"\xff\xfe\x00bad", "is not UTF-8"), (b"too short", "one window needs 64")],
)
def test_unusable_texts(run, tmp_path, content, says):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    code, _, err = run("perplexity", "--text", path, "--context", "64")
    assert code == 2
    assert says in err


def damage_truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def damage_header(folder):
    path = folder / "model.safetensors"
    path.write_bytes((1 << 40).to_bytes(8, "little") + path.read_bytes()[8:])


def damage_shapes(folder):
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] += 128
    (folder / "config.json").write_text(json.dumps(config))


def damage_layers(folder):
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (folder / "config.json").write_text(json.dumps(config))


def damage_config(folder):
    (folder / "config.json").write_text("{not json")


def damage_weights_gone(folder):
    (folder / "model.safetensors").unlink()


def damage_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (damage_truncate, "is damaged"),
        (damage_header, "is damaged: its header claims"),
        (damage_shapes, "but model."),
        (damage_layers, "but the weights hold layers 0 to 5"),
        (damage_config, "is not JSON"),
        (damage_weights_gone, "has no model.safetensors"),
        (damage_tokenizer, "tokenizer"),
    ],
)
def test_a_damaged_model_is_named_with_what_is_wrong(run, copy, damage, says):
    folder = copy(damage.__name__)
    damage(folder)
    code, out, err = run("perplexity", "--model", folder, *SHORT)
    assert (code, out) == (2, "")
    assert says in err
    assert "Traceback" not in err


def test_out_of_memory_for_the_pool_is_told_with_numbers(run, monkeypatch):
    monkeypatch.setattr("kvq.cache.memory.available_bytes", lambda device: 100_000)
    code, _, err = run("perplexity", *SHORT)
    assert code == 2
    assert "the KV pool needs 192.0 KiB on cpu, but 97.66 KiB is free; use a shorter context" in err


def test_plain_windows_gets_one_friendly_line(run, monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    code, out, err = run("doctor")
    assert (code, out) == (2, "")
    assert "WSL" in err
    assert len(err.splitlines()) == 1


def test_an_instrument_that_sees_nothing_is_exit_code_1(run):
    code, out, _ = run("perplexity", "--kv", "fp32", "--instrument", *SHORT)
    assert code == 1
    assert "can NOT show damage" in out


def test_a_reader_that_goes_away_ends_the_command_quietly():
    process = subprocess.Popen(
        [sys.executable, "-m", "kvq", "inspect"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    err = process.stderr.read()
    process.wait(timeout=HANG_S)
    assert "Traceback" not in err


def test_a_command_ends_with_its_status_once_all_that_waits_for_the_end_has_run():
    code = """
import atexit, sys, threading, time
import kvq.cli, kvq.__main__

def command():
    atexit.register(print, "at exit")
    threading.Thread(target=lambda: (time.sleep(0.1), print("a thread"))).start()
    sys.exit(3)

kvq.cli.main = command
kvq.__main__.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "a thread\nat exit\n", "")


@pytest.mark.parametrize("script", ["measure_formats.py", "stream_int4.py"])
def test_examples_run(script, capsys, monkeypatch):
    path = str(Path(__file__).parents[1] / "examples" / script)
    monkeypatch.setattr(sys, "argv", [path])
    runpy.run_path(path, run_name="__main__")
    assert "int4" in capsys.readouterr().out
