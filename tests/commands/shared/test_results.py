"""What every measuring command does before it begins, and writes at its end."""

import json
import sys

import pytest

from kvq.commands.shared.results import FinishedRows, begin, result_of, write_rows
from kvq.errors import ConfigError


def test_the_command_that_a_result_names_is_one_to_be_typed(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/opt/somewhere/kvq/__main__.py", "bench", "blocks", "--seed", "1"])
    assert result_of([])["command"] == "kvq bench blocks --seed 1"


def test_rows_are_written_where_that_was_asked_for(tmp_path):
    write_rows([{"a": 1}], None)
    write_rows([{"a": 1}], str(tmp_path / "r.json"), facts={"tokens": 3})
    written = json.loads((tmp_path / "r.json").read_text())
    assert (written["rows"], written["tokens"]) == ([{"a": 1}], 3)


@pytest.mark.parametrize(
    ("paths", "plot", "says"),
    [
        (("no/a.json",), None, "no folder no"),
        ((None,), "no/a.svg", "no folder no"),
        ((), "a.gif", "must"),
    ],
)
def test_results_that_can_not_be_written_are_refused_first(paths, plot, says):
    with pytest.raises(ConfigError, match=says):
        begin(*paths, plot=plot)


def test_the_end_writes_and_shows_the_whole_result(tmp_path):
    shown = []
    with FinishedRows(str(tmp_path / "r.json"), result_of, shown.append) as finished:
        finished.keep(lambda: [{"a": 1}])
        whole = finished.end([{"a": 1}, {"a": 2}])
    assert shown == [whole]
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]
    assert json.loads((tmp_path / "r.json").read_text()) == whole
