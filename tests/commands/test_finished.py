"""Finished rows of long measurements survive what ends these too early."""

import json
import signal
import subprocess
import sys

import pytest

from kvq.bench.engine.server import KvqServer
from kvq.calib import search
from kvq.commands.capacity import simulate_fleet
from kvq.commands.shared.results import FinishedRows
from kvq.errors import EngineError
from kvq.evals import divergence
from tests.waiting import HANG_S, wait_for


def _fail(result):
    raise AssertionError(f"shown: {result}")


def test_an_error_in_a_later_row_keeps_and_shows_the_earlier_ones(tmp_path, capsys):
    path, shown = tmp_path / "r.json", []
    _break_off(path, [1], [1, 2], show=shown.append)  # the second comes too soon to be written at once
    unfinished = {"rows": [1, 2], "complete": False}
    assert shown == [unfinished]
    assert json.loads((tmp_path / "r.partial.json").read_text()) == unfinished
    assert str(tmp_path / "r.partial.json") in capsys.readouterr().err
    assert not path.exists()


def test_a_whole_result_leaves_no_partial_one(tmp_path):
    path = tmp_path / "r.json"
    with FinishedRows(str(path), _result, _fail) as finished:
        finished.keep(lambda: [1])
        assert json.loads((tmp_path / "r.partial.json").read_text())["rows"] == [1]
    finished.finish(_result([1, 2]))
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]
    assert json.loads(path.read_text()) == {"rows": [1, 2]}


def test_without_a_file_finished_rows_are_shown(capsys):
    shown = []
    _break_off(None, [1], show=shown.append)
    assert shown == [{"rows": [1], "complete": False}]
    assert "above" in capsys.readouterr().err


def test_nothing_is_shown_where_nothing_is_finished(tmp_path, capsys):
    _break_off(tmp_path / "r.json", [])
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)],  # ends as Ctrl-C does
)
def test_a_signal_keeps_what_was_measured(tmp_path, number):
    command = [sys.executable, "-m", "kvq", "perplexity", "--kv", "bf16,int4", "--context", "80"]
    partial = tmp_path / "r.partial.json"
    with subprocess.Popen(
        [*command, "--json", str(tmp_path / "r.json")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_for(lambda: partial.exists() or process.poll() is not None, "rows on disk")
        process.send_signal(number)
        out, err = process.communicate(timeout=HANG_S)
    assert process.returncode != 0, err
    kept = json.loads(partial.read_text())
    assert kept["complete"] is False
    assert [row["kv"] for row in kept["rows"]] == ["bf16", "int4"]
    assert "int4" in out, "what was finished is shown, too"
    assert any(str(partial) in line for line in err.splitlines()[-3:]), err
    assert "Traceback" not in err
    assert [file.name for file in tmp_path.iterdir()] == [partial.name]


def test_perplexity_keeps_the_windows_before_an_error(kvq, tmp_path, monkeypatch):
    take = divergence.TokenFigures.take

    def fail(figures, chunk, reference, targets):
        if chunk.window == 3:
            raise EngineError("no luck")
        take(figures, chunk, reference, targets)

    monkeypatch.setattr(divergence.TokenFigures, "take", fail)
    kept = _kept(kvq, tmp_path, "perplexity", "--kv", "bf16,int4", "--context", 80, "--max-windows", 5)
    assert [(row["kv"], row["tokens"]) for row in kept] == [("bf16", 3 * 79), ("int4", 3 * 79)]


def test_tune_keeps_the_trials_before_an_error(kvq, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise EngineError("no luck")

    monkeypatch.setattr(search, "measure_tokens", fail)
    few = ("--context", 80, "--max-windows", 1, "--formats", "int4", "--out", tmp_path / "new.json")
    status, out, err = kvq("tune", "tiny", *few, "--json", tmp_path / "r.json")
    assert status == 2
    assert "no luck" in err
    assert [file.name for file in tmp_path.iterdir()] == ["r.partial.json"]
    assert str(tmp_path / "r.partial.json") in err
    result = json.loads((tmp_path / "r.partial.json").read_text())
    assert result["complete"] is False
    trials = result["sensitivities"]
    assert len({(trial["layer"], trial["part"]) for trial in trials}) == 12
    assert out.startswith("not complete")
    assert out.count("int4") == len(trials)


def test_bench_engine_keeps_the_format_before_an_error(kvq, tmp_path, monkeypatch):
    run = KvqServer.run

    def fail(self, requests, users):
        if self.kv == "int4":
            raise EngineError("no luck")
        return run(self, requests, users)

    monkeypatch.setattr(KvqServer, "run", fail)
    load = ("--requests", 1, "--input-len", 8, "--output-len", 2, "--repeats", 1, "--kv-memory", "4MiB")
    kept = _kept(kvq, tmp_path, "bench", "engine", "--kv", "int8,int4", *load)
    assert [row["kv"] for row in kept] == ["int8"]


def test_simulate_keeps_the_row_before_an_error(kvq, tmp_path, monkeypatch):
    summarize = simulate_fleet.summarize
    asked = []

    def fail(*arguments, **named):
        asked.append(arguments)
        if len(asked) == 2:
            raise EngineError("no luck")
        return summarize(*arguments, **named)

    monkeypatch.setattr(simulate_fleet, "summarize", fail)
    load = ("--model", "llama-3-8b", "--gpu", "h100", "--requests", 20, "--rate", 20)
    kept = _kept(kvq, tmp_path, "simulate", *load, "--kv", "fp16,int4")
    assert [row["kv"] for row in kept] == ["fp16"]


def test_comparing_with_an_unfinished_result_says_so(kvq, tmp_path):
    status, _, err = kvq(
        "perplexity", "--kv", "int8", "--context", 80, "--max-windows", 1, "--json", tmp_path / "a.json"
    )
    assert status == 0, err
    whole = json.loads((tmp_path / "a.json").read_text())
    (tmp_path / "b.json").write_text(json.dumps(whole | {"complete": False}))
    assert "not complete" not in "".join(kvq("compare", tmp_path / "a.json", tmp_path / "a.json")[1:])
    status, out, err = kvq("compare", tmp_path / "a.json", tmp_path / "b.json")
    assert "B is not complete" in " ".join((out + err).split())


def _kept(kvq, folder, *arguments):
    """The rows in the file that a command names when it fails."""
    status, out, err = kvq(*arguments, "--json", folder / "r.json")
    assert status != 0
    assert "no luck" in err
    assert [file.name for file in folder.iterdir()] == ["r.partial.json"]
    assert str(folder / "r.partial.json") in err
    result = json.loads((folder / "r.partial.json").read_text())
    assert result["complete"] is False
    assert result["rows"][-1]["kv"] in out
    return result["rows"]


def _break_off(path, *finished_rows, show=_fail):
    def measure():
        with FinishedRows(path and str(path), _result, show) as finished:
            for rows in finished_rows:
                finished.keep(rows.copy)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        measure()


def _result(rows):
    return {"rows": list(rows)}
