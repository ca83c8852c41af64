"""Traces of agents: equal seeds, sessions as asked for, files that come back, and blocks that are shared."""

import json
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks.agents.generate import PRESETS, draw
from benchmarks.agents.mooncake import HASHED_TOKENS, estimated, lines
from benchmarks.agents.replay import pool_blocks, random_ids, text_ids
from benchmarks.agents.trace import Piece, Trace, block_keys, read_trace, write_trace
from kvq.capacity.fleet.arrivals import traced
from kvq.errors import ConfigError

BENCH = PRESETS["bench"]


@pytest.fixture(scope="module")
def trace():
    return draw(BENCH, 5)


def ids(trace, turn, tokens=random_ids(4096)):  # noqa: B008 - one source for all
    return [token for piece in trace.pieces(turn) for token in tokens(piece)]


def test_equal_seeds_give_equal_traces(trace):
    assert draw(BENCH, 5).turns == trace.turns
    assert draw(BENCH, 6).turns != trace.turns


def test_sessions_have_as_many_turns_and_tokens_as_asked_for(trace):
    assert len(trace.last_turns()) == 60
    by_session = {}
    for turn in trace.turns:
        by_session.setdefault(turn.session, []).append(turn)
    for name, turns in by_session.items():
        lengths = [trace.prompt_tokens(turn) for turn in turns]
        assert lengths == sorted(lengths)
        assert 4400 < lengths[-1] + turns[-1].answer.tokens <= 6000
        if name[0] != "f":
            assert lengths[0] == 1000
            assert 6 <= len(turns) <= 10
    assert all(32 <= turn.answer.tokens <= 96 for turn in trace.turns)


def test_forks_go_on_from_another_session_and_sub_agents_are_waited_for(trace):
    first = {turn.session: turn for turn in reversed(trace.turns)}
    forks = [turn for name, turn in first.items() if name[0] == "f"]
    assert len(forks) == 6
    assert all(turn.base[0][0] == "s" and turn.after == (turn.base,) for turn in forks)
    agents = {name for name in first if name[0] == "a"}
    assert len(agents) == 12
    waited = {name for turn in trace.turns for name, _ in turn.after if name != turn.session}
    assert agents <= waited


def test_a_prompt_begins_with_the_prompt_and_answer_of_its_base(trace):
    known = {turn.id: turn for turn in trace.turns}
    tokens = random_ids(4096)
    for turn in random.Random(0).sample(trace.turns, 40):
        if turn.base is not None:
            base = known[turn.base]
            begin = ids(trace, base) + tokens(base.answer)
            assert ids(trace, turn)[: len(begin)] == begin


def test_sessions_share_one_of_two_beginnings(trace):
    tokens = random_ids(4096)
    begins = {tuple(tokens(turn.added[0])) for turn in trace.turns if turn.base is None}
    assert len(begins) == 2


def test_files_come_back(trace, tmp_path):
    path = tmp_path / "trace.jsonl"
    write_trace(trace, path)
    back = read_trace(path)
    assert back.turns == trace.turns
    assert back.about == json.loads(json.dumps(trace.about))


def test_turns_that_refer_to_later_ones_are_refused(trace):
    with pytest.raises(ConfigError, match="does not come before"):
        Trace(trace.turns[::-1], {})
    with pytest.raises(ConfigError, match="comes twice"):
        Trace([trace.turns[0], trace.turns[0]], {})


@pytest.mark.parametrize(
    ("field", "value"), [("pause_s", -1), ("answer", [1, 0]), ("added", [[1, 2, 3]]), ("base", 3)]
)
def test_a_damaged_line_is_named(trace, tmp_path, field, value):
    path = tmp_path / "trace.jsonl"
    write_trace(trace, path)
    first, second, *rest = path.read_text().splitlines()
    path.write_text("\n".join([first, json.dumps(json.loads(second) | {field: value}), *rest]))
    with pytest.raises(ConfigError, match="line 2"):
        read_trace(path)


@pytest.mark.parametrize("size", [16, 7, 512])
def test_blocks_have_equal_keys_exactly_if_all_tokens_up_to_their_ends_are_equal(trace, size):
    beginnings = {}
    for turn in random.Random(1).sample(trace.turns, 30):
        pieces = trace.pieces(turn)
        tokens, keys = ids(trace, turn), list(block_keys(pieces, size))
        assert len(keys) == -(-len(tokens) // size)
        for i, key in enumerate(keys):
            begin = tuple(tokens[: (i + 1) * size])
            assert beginnings.setdefault(key, begin) == begin
    assert len(set(beginnings.values())) == len(beginnings)


def test_demand_counts_common_beginnings_once(trace):
    whole = sum(trace.prompt_tokens(turn) + turn.answer.tokens for turn in trace.last_turns())
    blocks = trace.demand_blocks(16)
    assert 0.7 * whole < 16 * blocks < 0.95 * whole
    assert pool_blocks(trace, 16, 4.0) == blocks // 4
    with pytest.raises(ConfigError, match="context of"):
        pool_blocks(trace, 16, 50.0)


def test_shorter_runs_have_fewer_sessions_and_shorter_pauses():
    short = BENCH.scaled(5.0, 1.0)
    assert (short.sessions, short.pause_s) == (15, BENCH.pause_s / 4)
    alike = BENCH.scaled(5.0, 0.25)
    assert (alike.sessions, alike.first_tokens, alike.last_tokens[1]) == (60, 250, 1500)
    assert replace(BENCH, sessions=59) != BENCH.scaled(20.0, 1.0) == BENCH


def test_mooncakes_lines_have_the_tokens_in_common_that_prompts_have(trace, tmp_path):
    sent_s = estimated(trace, lambda turn: turn.answer.tokens / 50)
    found = lines(trace, sent_s, sessions=True)
    assert [line["timestamp"] for line in found] == sorted(line["timestamp"] for line in found)
    turns = sorted(trace.turns, key=lambda turn: sent_s[turn.id])
    for line, turn in zip(found, turns, strict=True):
        assert line["input_length"] == trace.prompt_tokens(turn)
        assert len(line["hash_ids"]) == -(-line["input_length"] // HASHED_TOKENS)
    by_session = [line["hash_ids"] for line in found if line["session"] == "s3"]
    for before, after in pairwise(by_session):
        full = len(before) - 1
        assert before[:full] == after[:full]
    path = tmp_path / "mooncake.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in found))
    calls = list(traced(path, max_context=8192, rate=None, seed=0))
    assert [len(call.prompt) for call in calls] == [line["input_length"] for line in found]


def test_texts_are_slices_of_a_file():
    tokens = text_ids(list(range(100, 110)))
    some = tokens(Piece(3, 25))
    assert len(some) == 25
    assert all(b - a in (1, -9) for a, b in pairwise(some))
    assert tokens(Piece(3, 5)) == some[:5]
