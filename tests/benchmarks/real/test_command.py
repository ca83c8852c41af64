"""`python -m benchmarks.real` goes on where it was, on the embedded model and without a lab."""

import gzip
import json

import pytest

from benchmarks.real import __main__ as command
from benchmarks.real import parts as measured
from benchmarks.real.closeness import full_name
from kvq.errors import ConfigError, EngineError
from kvq.evals import default_text
from kvq.models.loading.prepared import prepare


@pytest.fixture
def lab(tmp_path):
    data, tasks = tmp_path / "data" / "wikitext-2", tmp_path / "lab" / "tasks"
    for folder in (data, tasks / "essays"):
        folder.mkdir(parents=True)
    (data / "test.txt").write_text(default_text().text, encoding="utf-8")
    for name in "ab":
        (tasks / "essays" / f"{name}.txt").write_text(default_text().text, encoding="utf-8")
    raw = {
        "task_id": "a/0",
        "prompt": "def f():\n",
        "canonical_solution": "    return 1\n",
        "test": "def check(f):\n    assert f() == 1\n",
        "entry_point": "f",
    }
    (tasks / "HumanEval.jsonl.gz").write_bytes(gzip.compress(f"{json.dumps(raw)}\n".encode()))
    return tmp_path


def run(lab, *more):
    command.main(["--folder", str(lab / "lab"), "--data", str(lab / "data"), "--models", "tiny", *more])


def rows_of(lab):
    return [json.loads(line) for line in (lab / "lab" / "rows.jsonl").read_text().splitlines()]


def test_a_second_run_measures_what_is_new_alone(lab, capsys, monkeypatch):
    given = ("--parts", "wikitext", "--tokens", "1024")
    run(lab, *given, "--kv", "int4")
    assert [row["kv"] for row in rows_of(lab)] == ["fp32", "int4"]
    capsys.readouterr()
    run(lab, *given, "--kv", "int4,int2")
    assert [row["kv"] for row in rows_of(lab)] == ["fp32", "int4", "int2"]
    assert "| tiny | `int4` | 4.625 |" in capsys.readouterr().out

    def fails(*_):
        raise AssertionError("nothing is left to measure")

    for name in ("compare", "in_format"):
        monkeypatch.setattr(measured, name, fails)
    run(lab, *given, "--kv", "int2,int4")
    with pytest.raises(AssertionError, match="nothing is left"):
        run(lab, *given, "--kv", "int2", "--again")


def test_checks_are_of_fewer_tokens_where_fewer_are_asked_for(lab):
    for tokens, kv in (("1024", "int4, int2"), ("9999", "int4")):
        run(lab, "--parts", "checks", "--tokens", tokens, "--kv", kv)
    found = [(row["kv"], row["settings"]["tokens"]) for row in rows_of(lab)]
    assert found == [("fp32", 1024), ("int4", 1024), ("int2", 1024), ("fp32", 2048), ("int4", 2048)]


def test_a_name_that_means_another_format_is_measured_again(lab, monkeypatch):
    given = ("--parts", "wikitext", "--tokens", "1024", "--kv", "int4")
    run(lab, *given)
    monkeypatch.setattr(
        command, "full_name", lambda model, kv: "int4_g64" if kv == "int4" else full_name(model, kv)
    )
    run(lab, *given)
    assert [(row["kv"], row["settings"]["stored"]) for row in rows_of(lab)] == [
        ("fp32", "fp32/fp32"),
        ("int4", full_name(prepare("tiny"), "int4")),
        ("int4", "int4_g64"),
    ]


def test_every_part_gives_rows_in_the_projects_shape(lab, capsys):
    out = lab / "out"
    out.mkdir()
    given = ("--kv", "int4", "--problems", "1", "--facts", "3", "--tokens", "2048", "--out", str(out))
    run(lab, "--parts", "essays,humaneval,retrieval", *given)
    shown = capsys.readouterr().out
    for part in ("essays", "humaneval", "retrieval"):
        assert f"{part}: " in shown
        found = json.loads((out / f"real-{part}.json").read_text())
        assert {"commit", "date", "device", "versions", "command", "rows", "weights"} <= found.keys()
        assert [row["kv"] for row in found["rows"]] == ["fp32", "int4"]
        assert found["rows"][1]["bits_held_8192"] == pytest.approx(4.6875)
    first, second = json.loads((out / "real-retrieval.json").read_text())["rows"]
    assert "against_baseline" not in first
    assert second["against_baseline"]["gained"] <= second["hits"]
    assert second["cached_tokens_least"] > 3000


def test_a_measurement_that_fails_keeps_nobody_else(lab, capsys):
    with pytest.raises(EngineError, match="1 measurements failed"):
        run(lab, "--parts", "humaneval", "--problems", "1", "--kv", "kivi-k2v2,int4")
    assert [row["kv"] for row in rows_of(lab)] == ["fp32", "int4"]
    shown = capsys.readouterr().out
    assert "kivi-k2v2 is simulated and can't generate" in shown
    assert "| tiny | `int4` |" in shown


@pytest.mark.parametrize(
    ("option", "value"), [("--tokens", "0"), ("--problems", "-1"), ("--out", "/none/there")]
)
def test_options_that_can_not_be_are_refused_at_once(lab, option, value):
    with pytest.raises(ConfigError):
        run(lab, "--parts", "wikitext", option, value)


def test_models_that_are_not_there_are_refused_with_what_to_do(lab):
    with pytest.raises(ConfigError, match="make real REAL="):
        run(lab, "--models", "smollm2", "--parts", "wikitext")
    with pytest.raises(SystemExit):
        run(lab, "--models", "nobody")


def test_published_rows_count_as_measured_and_stay(lab, monkeypatch, capsys):
    out = lab / "out"
    out.mkdir()
    given = ("--parts", "wikitext", "--tokens", "1024", "--out", str(out))
    run(lab, *given, "--kv", "int4,int2")
    (lab / "lab" / "rows.jsonl").unlink()
    first = json.loads((out / "real-wikitext.json").read_text())["rows"]
    run(lab, *given, "--kv", "int8,int4")
    again = json.loads((out / "real-wikitext.json").read_text())["rows"]
    assert [row["kv"] for row in again] == ["fp32", "int4", "int2", "int8"]
    assert again[:3] == first
    assert [row["kv"] for row in rows_of(lab)] == ["int8"]
    monkeypatch.setattr(
        command, "full_name", lambda model, kv: "int4_g64" if kv == "int4" else full_name(model, kv)
    )
    run(lab, *given, "--kv", "int4")  # the name means another format: its row is replaced
    again = json.loads((out / "real-wikitext.json").read_text())["rows"]
    assert [row["kv"] for row in again] == ["fp32", "int4", "int2", "int8"]
    assert again[1]["settings"]["stored"] == "int4_g64"
    (out / "real-wikitext.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"no file of rows .*--out"):
        run(lab, *given)


def test_other_weights_are_another_measurement_with_a_baseline_of_their_own(lab):
    given = ("--parts", "wikitext", "--tokens", "1024", "--kv", "int8")
    run(lab, *given)
    run(lab, *given, "--weights", "int4")
    rows = rows_of(lab)
    assert [row["settings"].get("weights") for row in rows] == [None, None, "int4", "int4"]
    assert rows[2]["perplexity"] != rows[0]["perplexity"]
    assert rows[3]["kl_mean"] < 0.001


def test_windows_of_the_essays_are_chosen(lab):
    run(lab, "--parts", "essays", "--tokens", "256", "--windows", "128,256", "--kv", "int8")
    assert [row["settings"]["context"] for row in rows_of(lab)] == [128, 128, 256, 256]
    with pytest.raises(ConfigError, match=r"--windows must be of 2 tokens at least, got \(1,\)"):
        run(lab, "--parts", "essays", "--windows", "1")
