"""`kvq plan`, `kvq models`, `kvq gpus` as people type them."""

import json

import pytest

from kvq.cli import main


@pytest.fixture
def run(capsys):
    def run(*arguments):
        try:
            main(list(arguments))
            status = 0
        except SystemExit as ended:
            status = ended.code or 0
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def test_a_plan_as_a_table_and_as_json(run, tmp_path):
    path = tmp_path / "plan.json"
    status, out, _ = run(
        *(
            "plan",
            "--model",
            "llama-2-13b",
            "--gpu",
            "a100-80",
            "--kv",
            "fp16,int8,int4",
            "--context",
            "4096",
        ),
        *("--weights", "int4", "--users", "3000", "--json", str(path)),
    )
    assert status == 0
    for part in ("linear weights", "KV pool, fp16", "12,687,769,600 x 0.5 B (int4)", "GPUs needed"):
        assert part in out
    rows = json.loads(path.read_text())["rows"]
    assert [row["kv"] for row in rows] == ["fp16", "int8", "int4"]
    needed = [row["gpus_needed"] for row in rows]
    assert needed[0] > needed[1] > needed[2] > 0
    for row in rows:
        assert row["gpus_needed"] == -(-3000 // row["max_users"])
        assert sum(term["bytes"] for term in row["terms"]) <= 80e9
        assert 80e9 - sum(term["bytes"] for term in row["terms"]) < row["block_bytes"]
        assert row["pool_bytes"] == row["num_blocks"][0] * row["block_bytes"]


def test_lengths_may_be_distributions_and_models_folders(run, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"prompt_tokens": 900, "output_tokens": 100}\n')
    status, _, _ = run("plan", "-m", "tiny", "--gpu", "l4,h100", "--trace", str(trace), "--weights-gb", "0.1")
    assert status == 0
    status, out, _ = run("plan", "-m", "gemma-3-4b", "--gpu", "l4", "--lognormal", "1000,0.9", "--kv", "k8v4")
    assert status == 0
    assert "sliding-1024" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-m", "llama-3-70b", "--gpu", "h100", "--context", "8192"), "62.9 GB too much"),
        (("-m", "llama-3-70", "--gpu", "h100", "--context", "8192"), "did you mean 'llama-3-70b'"),
        (("-m", "llama-3-8b", "--gpu", "h10", "--context", "8192"), "did you mean 'h100'"),
        (("-m", "llama-3-8b", "--gpu", "h100"), "give one of --context, --lognormal, --trace"),
        (("-m", "llama-3-8b", "--gpu", "h100", "--context", "9999"), "above the model's 8192"),
        (("-m", "llama-3-8b", "--gpu", "h100", "--context", "0"), "--context"),
        (("-m", "llama-3-8b", "--gpu", "h100", "--lognormal", "9"), "MEDIAN,SIGMA"),
        (("-m", "llama-3-8b", "--gpu", "h100", "--context", "64", "--weights-gb", "-1"), "above 0"),
        (("-m", "llama-3-8b", "--gpu", "h100", "--context", "64", "--runtime-gb", "-1"), "at least 0"),
        (("-m", "llama-3-8b", "--gpu", "h100", "--context", "64", "--kv", "int5"), "int5"),
        (("-m", "llama-3-8b", "--gpu", "h100", "--context", "64", "-tp", "3"), "can't be shared by 3"),
    ],
)
def test_what_cannot_be_planned_says_why(run, arguments, message):
    status, _, err = run("plan", *arguments)
    assert status == 2
    assert message in err
    assert "Traceback" not in err


def test_what_fits_is_shown_beside_what_does_not(run):
    status, out, err = run(
        "plan", "-m", "llama-2-13b", "--gpu", "l4,a100-80", "--context", "4096", "--kv", "int4"
    )
    assert status == 0
    assert "a100-80" in out
    assert "left out: llama-2-13b does not fit on 1 x l4" in err


def test_lists(run, tmp_path):
    status, out, _ = run("models", "--json", str(tmp_path / "m.json"))
    assert status == 0
    assert "llama-3.1-405b" in out
    assert len(json.loads((tmp_path / "m.json").read_text())["rows"]) > 40
    status, out, _ = run("gpus", "--json", str(tmp_path / "g.json"))
    assert status == 0
    assert "mi300x" in out
    status, again, _ = run("gpus", "--gpus", str(tmp_path / "g.json"))
    assert (status, again) == (0, out)
