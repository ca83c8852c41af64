"""Agent traces, tiers and ladders in simulated engines."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvq.capacity.fleet.agents import agent_calls, read_agents
from kvq.capacity.fleet.fleet import FleetSpec, serve
from kvq.capacity.fleet.memory import TierSpec
from kvq.capacity.fleet.records import Fate, FleetRun, summarize
from kvq.capacity.fleet.routing import Routing
from kvq.errors import ConfigError
from tests.capacity.fleet.kit import engine

BLOCK = 1 << 20  # bytes


def turn(
    session: str, number: int, base: Any, after: list[Any], pause_s: float, *added: int
) -> dict[str, Any]:
    """A turn whose pieces have seeds of their own; those of all sessions begin with seed 0."""
    seed = 100 * (1 + ord(session[0])) + 10 * int(session[1:]) + number
    pieces = [[0 if base is None and i == 0 else 1000 * seed + i, n] for i, n in enumerate(added)]
    return {
        "session": session, "turn": number, "base": base, "after": after, "pause_s": pause_s,
        "added": pieces, "answer": [-seed, 20],
    }  # fmt: skip


def written(path: Path, turns: list[dict[str, Any]]) -> Path:
    lines = [json.dumps({"format_version": 1}), *map(json.dumps, turns)]
    path.write_text("\n".join(lines) + "\n")
    return path


def sessions(path: Path, count: int, turns: int) -> Path:
    """Sessions that grow by 160 tokens a turn, and pause for 5 s."""
    found = []
    for number in range(turns):
        for i in range(count):
            before = [f"s{i}", number - 1] if number else None
            after = [before] if before else []
            found.append(turn(f"s{i}", number, before, after, 5.0 if number else 0.1 * i, 80, 80))
    return written(path, found)


def load(path: Path) -> Any:
    return partial(agent_calls, read_agents(path))


def ran(path: Path, blocks: int = 400, tiers: TierSpec | None = None, **more: Any) -> FleetRun:
    spec = replace(engine(blocks), tiers=tiers or TierSpec())
    return serve(load(path), FleetSpec(engine=spec, **more))


def below(host: int = 0, disk: int = 0, **more: Any) -> TierSpec:
    """Tiers of so many blocks."""
    return TierSpec(block_bytes=[BLOCK], **more, host_bytes=host * BLOCK, disk_bytes=disk * BLOCK)


def test_turns_pause_after_those_they_wait_for(tmp_path: Path) -> None:
    turns = [
        turn("s1", 0, None, [], 1.5, 200),
        turn("s1", 1, ["s1", 0], [["s1", 0]], 4.0, 100),
        turn("a1", 0, None, [["s1", 0]], 0.5, 300),  # a sub-agent, for whose end the next turn waits
        turn("s1", 2, ["s1", 1], [["s1", 1], ["a1", 0]], 2.0, 100),
        turn("f1", 0, ["s1", 1], [["s1", 1]], 1.0, 50),  # a fork
    ]
    records = ran(written(tmp_path / "t.jsonl", turns)).records
    assert set(records.fate) == {Fate.SERVED}
    by_prompt = {records.prompt_tokens[i]: i for i in range(len(records))}
    first, second, agent, third, fork = (by_prompt[n] for n in (200, 320, 300, 440, 390))
    sent, ended = records.arrival_s, records.end_s
    assert sent[first] == 1.5
    assert sent[second] == ended[first] + 4.0
    assert sent[agent] == ended[first] + 0.5
    assert sent[third] == max(ended[second], ended[agent]) + 2.0
    assert sent[fork] == ended[second] + 1.0
    assert records.cached_tokens[fork] == 336  # of 340, in blocks of 16
    assert records.cached_tokens[third] >= 336


def test_slow_engines_get_turns_later(tmp_path: Path) -> None:
    path = sessions(tmp_path / "t.jsonl", 3, 4)
    slow = replace(engine(400), time=replace(engine().time, sequence_s=0.05))
    records = ran(path).records
    later = serve(load(path), FleetSpec(engine=slow)).records
    assert max(later.arrival_s) > max(records.arrival_s) + 1


def test_answers_of_the_trace_are_no_hits(tmp_path: Path) -> None:
    path = sessions(tmp_path / "t.jsonl", 1, 2)
    spec = FleetSpec(engine=engine(400))
    own, given = (
        serve(partial(agent_calls, read_agents(path), repeats_trace=x), spec).records.cached_tokens
        for x in (False, True)
    )
    assert (own[1], given[1]) == (176, 160)  # 160 tokens of the prompt, and 20 of the answer


def test_tiers_keep_what_leaves_the_pool(tmp_path: Path) -> None:
    path = sessions(tmp_path / "t.jsonl", 12, 4)  # of 45 blocks at their ends; two of them fit side by side
    shares = [
        summarize(ran(path, 100, tiers))["prefix_hit_rate"]
        for tiers in (None, below(host=100), below(host=1000), below(disk=1000), below(host=20, disk=1000))
    ]
    assert shares[0] < shares[1] < shares[2]
    assert shares[3] == pytest.approx(shares[2], abs=0.02)
    assert shares[4] == pytest.approx(shares[2], abs=0.02)


def test_a_ladder_keeps_more_in_the_pool(tmp_path: Path) -> None:
    path = sessions(tmp_path / "t.jsonl", 12, 4)
    packed = summarize(ran(path, 160, below(rungs={0: [BLOCK // 2, BLOCK // 4]})))
    assert packed["prefix_hit_rate"] > summarize(ran(path, 160))["prefix_hit_rate"] + 0.1


def test_moving_takes_time(tmp_path: Path) -> None:
    path = sessions(tmp_path / "t.jsonl", 12, 4)
    fast, slow = below(host=1000), replace(below(host=1000), host_s=1e-8)
    assert summarize(ran(path, 60, slow))["ttft_ms_p95"] > summarize(ran(path, 60, fast))["ttft_ms_p95"]
    late = replace(below(disk=1000), disk_s=1e-8)
    first, second = (ran(path, 60, tiers).records for tiers in (below(disk=1000), late))
    assert max(second.end_s) > max(first.end_s)


@pytest.mark.parametrize("replicas", [1, 3])
def test_runs_repeat_and_leaps_change_nothing(tmp_path: Path, replicas: int) -> None:
    path = sessions(tmp_path / "t.jsonl", 8, 3)
    spec = FleetSpec(engine=engine(100), replicas=replicas, routing=Routing.SESSION)
    digests = [serve(load(path), spec, leaps=leaps).digest for leaps in (True, True, False)]
    assert len(set(digests)) == 1
    tiers = below(host=50, disk=200, rungs={0: [BLOCK // 2]})
    assert ran(path, 60, tiers).digest == ran(path, 60, tiers).digest


def test_a_base_that_is_not_waited_for_is(tmp_path: Path) -> None:
    turns = [turn("s1", 0, None, [], 1.5, 200), turn("f1", 0, ["s1", 0], [], 1.0, 50)]
    records = ran(written(tmp_path / "t.jsonl", turns)).records
    assert records.arrival_s[1] == records.end_s[0] + 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"session": 7}, "session must be a text, got 7"),
        ({"turn": "0"}, "turn must be a whole number that the session did not have, got '0'"),
        ({"session": "s1"}, "turn must be a whole number that the session did not have, got 0"),
        ({"base": ["s9", 0]}, r"base must be null or the \[session, turn\] of a line before"),
        ({"base": "s1"}, "base must be null or"),
        ({"base": [["s1"], 0]}, "base must be null or"),
        ({"after": [["s9", 0]]}, r"after must be a list of \[session, turn\] of lines before"),
        ({"after": ["s1", 0]}, "after must be a list"),
        ({"after": None}, "after must be a list"),
        ({"pause_s": -1}, "pause_s must be seconds of at least 0, got -1"),
        ({"pause_s": "2"}, "pause_s must be seconds of at least 0, got '2'"),
        ({"pause_s": True}, "pause_s must be seconds of at least 0"),
        ({"answer": [1, 0]}, r"answer must be \[seed, tokens\] in whole numbers, with 1 to 16,777,216"),
        ({"answer": [1, 2.0]}, "answer must be"),
        ({"answer": None}, "answer must be .* got None"),
        ({"added": []}, r"added must be a list of \[seed, tokens\] .*, and not empty, got \[\]"),
        ({"added": [[1, 2, 3]]}, "added must be a list"),
        ({"added": [[1, 1 << 40]]}, "added must be a list"),
        ({"added": 3}, "added must be a list"),
        ({"bass": ["s1", 0]}, "each field must be one of session, turn, .* got 'bass'; did you mean 'base'"),
    ],
)  # fmt: skip
def test_bad_fields_are_named_with_what_is_allowed(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    turns = [turn("s1", 0, None, [], 1.5, 200), turn("s2", 0, None, [], 1.5, 200) | change]
    with pytest.raises(ConfigError, match=f"t.jsonl, line 3: {message}"):
        read_agents(written(tmp_path / "t.jsonl", turns))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"format_version": 2}'], "line 1: format_version must be 1"),
        (['{"format_version": 1}'], "has no turns"),
        (['{"format_version": 1}', "[1]"], "line 2: session must be a text, got None"),
        (["[1]"], "line 1: format_version must be 1"),
        (['{"format_version": 1}', "{"], "line 2: it is no JSON"),
        (['{"format_version": 1}', '{"pause_s": NaN}'], "line 2: "),
        (['{"format_version": 1}', "\udcff"], "line 2: it is no JSON"),
        ([""], "has no turns"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, lines: list[str], message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes("\n".join(lines).encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=message):
        read_agents(path)
