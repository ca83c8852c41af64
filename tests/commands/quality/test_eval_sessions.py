"""`kvq eval` and `kvq tune` on sessions: figures, tables, pages, refusals."""

import json

import pytest

from tests.traces.test_measure import session

FEW = ("--kv", "fp32,int2", "--kv-memory", "64MiB", "--resamples", 100)


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "sessions.jsonl"
    lines = [
        {"messages": one.messages, "tools": one.tools, "session": one.name}
        for one in (session(i) for i in range(5))
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"messages": 3}\n')
    return path


def test_a_log_is_measured(kvq, log, tmp_path):
    page = tmp_path / "page.html"
    status, said, err = kvq(
        "eval", "tiny", *FEW, "--traces", log, "--forced-calls", "--show-texts", "--html", page,
        "--finished", tmp_path / "parts", "--gate", "int2:traces.failed<=1",
    )  # fmt: skip
    assert status == 0, err
    result = json.loads((tmp_path / "page.json").read_text())
    assert result["text"] == str(log)
    base, low = result["traces"]
    assert (base["asked"], low["asked"], base["invalid"]) == (10, 10, 0)
    facts = result["traces_facts"]
    assert (facts["sessions"], facts["checked"], list(facts["refused"])) == (5, False, ["line 6"])
    for words in (
        "decisions alike",
        "by kind of token",
        "by depth",
        "by turn",
        "line 6",
        "nothing could be judged",
    ):
        assert words in said.replace("\n", " ").lower(), words
    html = page.read_text()
    assert "turns that fail" in html
    assert (tmp_path / "parts.traces").exists()
    assert "int2" in html


def test_generated_sessions_scored_only(kvq, tmp_path):
    found = tmp_path / "found.json"
    status, out, err = kvq(
        "eval", "tiny", *FEW, "--tasks", "edits", "--sessions", 1, "--scores-only", "--json", found
    )
    assert status == 0, err
    assert "not judged" in out + err
    assert "turns run" not in out + err, "what was not measured has no figure"
    result = json.loads(found.read_text())
    base, low = result["edits"]
    assert base["turns"] == low["turns"] > 3
    assert base["asked"] == 0
    assert low["kl_decisive"] > 0
    assert result["edits_facts"]["checked"]
    status, _, err = kvq(
        "eval", "tiny", *FEW, "--tasks", "edits", "--sessions", 1, "--scores-only", "--gate", "failed<=0"
    )
    assert status != 0, "a gate on what was not run"
    assert "failed" in err


def test_what_is_refused(kvq, log, tmp_path):
    for arguments, words in (
        (("eval", "tiny", "--tasks", "traces"), "--traces sessions.jsonl"),
        (("tune", "tiny", "--traces", log), "--objective traces"),
        (("eval", "tiny", "--traces", tmp_path), "can't read"),
        (("eval", "tiny", "--tasks", "tool"), "did you mean 'tools'"),
    ):
        status, _, err = kvq(*arguments)
        assert status != 0
        assert words in err.replace("\n", " ")


def test_a_recipe_for_traces_says_so_and_is_measured_on_other_sessions(kvq, log, tmp_path):
    out, found = tmp_path / "kvq.json", tmp_path / "found.json"
    status, told, err = kvq(
        "tune", "tiny", "--objective", "traces", "--traces", log, "--context", 64, "--max-windows", 2,
        "--verify-windows", 2, "--formats", "int8,int4", "--budget", "5bits", "--out", out, "--json", found,
    )  # fmt: skip
    assert status == 0, err
    assert "KL in sessions" in told
    first, *others = json.loads(found.read_text())["rows"]
    assert first["decisive_kl"] == 0
    assert all(row["decisive_kl"] > 0 for row in others)
    assert f"searched on {log}" in json.loads(out.read_text())["measured_on"]
    assert (
        kvq("perplexity", "--model", "tiny", "--kv", f"fp32,{out}", "--max-windows", 1, "--context", 64)[0]
        == 0
    )
