"""Loads: drawn and read; percentiles; sizing."""

import json
import random
from itertools import islice, pairwise
from pathlib import Path

import pytest

from kvq.capacity.fleet.arrivals import traced
from kvq.capacity.fleet.fleet import fewest_replicas
from kvq.capacity.fleet.records import _Histogram, percentile
from kvq.capacity.lengths import read_lines, read_trace
from kvq.errors import ConfigError
from kvq.scheduler import Priority
from tests.capacity.fleet.kit import load


def test_arrivals_have_the_rate_and_the_lengths_asked_for():
    calls = list(load(10.0).calls(4000, 0))
    assert [call.number for call in calls] == list(range(4000))
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(calls))
    assert 4000 / calls[-1].arrival_s == pytest.approx(10.0, rel=0.05)
    assert percentile([len(call.prompt) for call in calls], 50) == pytest.approx(40, rel=0.05)
    assert all(len(call.prompt) + call.output_tokens <= 1000 and call.output_tokens >= 1 for call in calls)


def test_turns_keep_the_rate_and_go_on_from_what_was_said():
    calls = list(load(10.0, turns=4, think_s=1.0, max_context=100_000).calls(8000, 0))
    assert 8000 / calls[-1].arrival_s == pytest.approx(10.0, rel=0.1)
    talks: dict[str, list] = {}
    for call in calls:
        talks.setdefault(call.session, []).append(call)
    pairs = [(a, b) for turns in talks.values() for a, b in pairwise(turns)]
    assert len(pairs) > 5000
    for before, after in pairs:
        said = before.prompt + before.answer(0, before.output_tokens)
        assert after.prompt[: len(said)] == said[: len(after.prompt)]
    assert max(map(len, talks.values())) == 4


def test_prefixes_are_shared_by_groups():
    calls = list(load(shared_prefix=0.5, num_prefixes=3).calls(300, 0))
    begins = {call.prompt[:4].tobytes() for call in calls if len(call.prompt) >= 8}
    assert len(begins) == 3


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_traces_of_kvq(tmp_path: Path):
    path = write(
        tmp_path / "t.jsonl",
        {"prompt_tokens": 9, "output_tokens": 3, "arrival_s": 0.5, "tenant": "a", "priority": "batch"},
        "",
        {"prompt_tokens": 2000, "output_tokens": 0, "arrival_s": 1, "session": "s"},
    )
    first, second = traced(path, max_context=100, rate=None, seed=0)
    assert (len(first.prompt), first.output_tokens, first.arrival_s, first.tenant) == (9, 3, 0.5, "a")
    assert first.priority is Priority.BATCH
    assert (len(second.prompt), second.output_tokens, second.session) == (99, 1, "s")
    assert [length.total for length in read_trace(path)] == [12, 2000]


def test_traces_of_mooncake_share_what_their_hashes_share(tmp_path: Path):
    line = {"timestamp": 1500, "input_length": 1300, "output_length": 5, "hash_ids": [7, 8, 9]}
    path = write(tmp_path / "m.jsonl", line, line | {"hash_ids": [7, 8, 10]}, line | {"hash_ids": []})
    a, b, c = traced(path, max_context=4096, rate=None, seed=0)
    assert a.arrival_s == 1.5
    assert a.prompt[:1024] == b.prompt[:1024]
    assert a.prompt[1024:] != b.prompt[1024:]
    assert len(a.prompt) == len(b.prompt) == len(c.prompt) == 1300
    assert c.prompt[0] != a.prompt[0]


def test_traces_of_azure(tmp_path: Path):
    path = write(
        tmp_path / "a.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.9951690,396,109",
    )
    found = list(traced(path, max_context=1000, rate=None, seed=0))
    assert [(len(call.prompt), call.output_tokens) for call in found] == [(374, 44), (396, 109)]
    assert found[1].arrival_s == pytest.approx(4.314579)


def test_a_rate_takes_the_place_of_times(tmp_path: Path):
    path = write(tmp_path / "t.jsonl", *[{"prompt_tokens": 5, "output_tokens": 3}] * 500)
    calls = list(traced(path, max_context=100, rate=5.0, seed=0))
    assert 500 / calls[-1].arrival_s == pytest.approx(5.0, rel=0.15)
    with pytest.raises(ConfigError, match="--rate"):
        list(traced(path, max_context=100, rate=None, seed=0))


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "null",
        {},
        {"prompt_tokens": 0, "output_tokens": 1},
        {"prompt_tokens": 1.5, "output_tokens": 1},
        {"prompt_tokens": True, "output_tokens": 1},
        {"prompt_tokens": 1, "output_tokens": -1},
        {"prompt_tokens": 1, "output_tokens": 1, "arrival_s": -1},
        {"prompt_tokens": 1, "output_tokens": 1, "arrival_s": "x"},
        {"prompt_tokens": 1, "output_tokens": 1, "priority": "urgent"},
        {"prompt_tokens": 1, "output_tokens": 1, "hash_ids": 5},
        '{"prompt_tokens": 1, "output_tokens": 1, "arrival_s": NaN}',
        "[" * 100_000,
    ],
)
def test_lines_that_are_none_are_told_by_number(tmp_path: Path, line: object):
    path = write(tmp_path / "t.jsonl", {"prompt_tokens": 1, "output_tokens": 1}, line)
    with pytest.raises(ConfigError, match="line 2"):
        list(read_lines(path))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("share.json", '[{"id": "1", "conversations": [{"from": "human", "value": "hi"}]}]'),
        ("share.jsonl", '{"id": "1", "conversations": [{"from": "human", "value": "hi"}]}'),
        ("pretty.json", '[\n  {"prompt_tokens": 1, "output_tokens": 1}\n]'),
        ("azure.txt", "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,1,2"),
        ("packed.jsonl", b"\x1f\x8b\x08\x00"),
        ("fields.csv", "a,b\n1,2"),
    ],
)
def test_a_file_of_another_kind_is_told_which_forms_are_read(tmp_path: Path, name: str, text: str | bytes):
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError) as told:
        list(read_lines(path))
    said = str(told.value)
    assert "TIMESTAMP, ContextTokens, GeneratedTokens" in said
    assert ("prompt_tokens" in said) == (path.suffix != ".csv")
    for word in ("indices", "codec", "Expecting", "object has", "int()"):
        assert word not in said


@pytest.mark.parametrize("row", ["yesterday,1,2", "2024-05-10 00:00:00,x,2", "2024-05-10 00:00:00,1"])
def test_a_row_that_is_none_is_shown(tmp_path: Path, row: str):
    path = write(tmp_path / "a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens", row)
    with pytest.raises(ConfigError, match="line 2: no time and numbers: ") as told:
        list(read_lines(path))
    assert "int()" not in str(told.value)


def test_files_that_are_none(tmp_path: Path):
    for path in (tmp_path / "no.jsonl", tmp_path, write(tmp_path / "x.csv", "a,b", "1,2")):
        with pytest.raises(ConfigError):
            list(read_lines(path))
    with pytest.raises(ConfigError, match="no requests"):
        list(traced(write(tmp_path / "empty.jsonl", ""), max_context=10, rate=None, seed=0))


def test_a_histogram_is_as_good_as_all_values():
    rng = random.Random(0)
    values = [rng.lognormvariate(-4, 1) for _ in range(5000)]
    histogram = _Histogram()
    for value in values:
        histogram.add(value)
    for rank in (1, 50, 95, 99, 99.9):
        assert histogram.percentile(rank) == pytest.approx(percentile(values, rank), rel=2e-3)
    assert histogram.total == pytest.approx(sum(values))
    twice = _Histogram()
    twice.merge(histogram)
    twice.merge(histogram)
    assert twice.count == 10_000
    assert twice.percentile(50) == histogram.percentile(50)
    assert _Histogram().percentile(50) is None
    nothing = _Histogram()
    nothing.add(0.0, 3)
    assert nothing.percentile(99) == 0.0


@pytest.mark.parametrize("needed", [1, 2, 3, 7, 8, 13, 100])
def test_the_fewest_replicas_are_found(needed: int):
    tried = []

    def run(replicas: int) -> dict:
        tried.append(replicas)
        return {"slo_met": min(1.0, replicas / needed), "utilization": 0.9}

    assert fewest_replicas(run, 1.0)[0] == needed
    assert len(tried) <= 2 * needed.bit_length() + 1


def test_what_more_replicas_do_not_help_is_said():
    with pytest.raises(ConfigError, match="more don't help"):
        fewest_replicas(lambda n: {"slo_met": 0.4, "utilization": 0.1}, 0.9)
    with pytest.raises(ConfigError, match="more don't help"):
        fewest_replicas(lambda n: {"slo_met": None, "utilization": 0.0}, 0.9)


def test_a_load_is_drawn_lazily():
    assert len(list(islice(load().calls(1 << 60, 0), 3))) == 3
