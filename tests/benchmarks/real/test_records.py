"""A run goes on where it ended: what is there is found, what was cut off is made again."""

import json

import pytest

from benchmarks.real.records import Records, key_of
from kvq.errors import ConfigError

SETTINGS = {"context": 1024, "tokens": 4000}


def test_rows_are_found_by_what_was_asked_for_alone(tmp_path):
    file = tmp_path / "new" / "rows.jsonl"
    Records(file).add("tiny", "wikitext", "int4", SETTINGS, {"kl_mean": 0.5})
    again = Records(file)
    assert again.find("tiny", "wikitext", "int4", dict(reversed(SETTINGS.items())))["kl_mean"] == 0.5
    for other in (
        ("other", "wikitext", "int4", SETTINGS),
        ("tiny", "essays", "int4", SETTINGS),
        ("tiny", "wikitext", "int8", SETTINGS),
        ("tiny", "wikitext", "int4", SETTINGS | {"tokens": 1}),
    ):
        assert again.find(*other) is None
        assert key_of(*other) != key_of("tiny", "wikitext", "int4", SETTINGS)


def test_a_later_row_replaces_an_earlier_one(tmp_path):
    file = tmp_path / "rows.jsonl"
    records = Records(file)
    for value in (1, 2):
        records.add("tiny", "wikitext", "int4", SETTINGS, {"kl_mean": value})
    assert Records(file).find("tiny", "wikitext", "int4", SETTINGS)["kl_mean"] == 2


def test_a_last_line_that_was_cut_off_is_dropped_and_others_are_refused(tmp_path):
    file = tmp_path / "rows.jsonl"
    Records(file).add("tiny", "wikitext", "int4", SETTINGS, {"kl_mean": 1})
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:30])
    Records(file).add("tiny", "wikitext", "int8", SETTINGS, {"kl_mean": 2})
    assert [json.loads(line)["kv"] for line in file.read_text().splitlines()] == ["int4", "int8"]
    file.write_bytes(b"{}\n" + whole)
    with pytest.raises(ConfigError, match="line 1 is no row"):
        Records(file)


def test_a_figure_that_is_no_number_is_not_written(tmp_path):
    file = tmp_path / "rows.jsonl"
    with pytest.raises(ValueError, match="JSON"):
        Records(file).add("tiny", "wikitext", "int4", SETTINGS, {"kl_mean": float("nan")})
    assert not file.exists()


def test_times_are_of_the_same_model_where_there_are_any(tmp_path):
    records = Records(tmp_path / "rows.jsonl")
    records.add("a", "wikitext", "int4", SETTINGS, {"seconds": 3.0})
    assert records.seconds_of("b", "wikitext") == [3.0]
    records.add("b", "wikitext", "int4", SETTINGS, {"seconds": 5.0})
    assert records.seconds_of("b", "wikitext") == [5.0]
    assert records.seconds_of("b", "essays") == []
