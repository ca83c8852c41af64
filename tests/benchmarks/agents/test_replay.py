"""Replays of agent traces: every turn is answered in its order, and what differs between runs is found."""

import asyncio
import copy

import pytest

from benchmarks.agents.compare import differences, rows
from benchmarks.agents.generate import PRESETS, draw
from benchmarks.agents.replay import Replay, prompts, random_ids, summary
from kvq.engine import LLM, AsyncLLM, SamplingParams
from kvq.models import load


@pytest.fixture(scope="module")
def trace():
    shape = PRESETS["bench"].scaled(0.05, 0.05)  # 3 sessions of up to 300 tokens
    return draw(shape, 2)


@pytest.fixture(scope="module")
def model():
    return load("tiny", "int8")


@pytest.fixture(scope="module")
def replayed(trace, model):
    async def run():
        async with AsyncLLM(model, num_blocks=60) as engine:
            replay = Replay(trace, engine, random_ids(model.geometry.vocab_size))
            await replay.run()
            return replay.rows

    return asyncio.run(run())


def test_every_turn_is_answered_after_those_that_it_waits_for(trace, replayed):
    known = {(row["session"], row["turn"]): row for row in replayed}
    assert len(known) == len(replayed) == len(trace.turns)
    for turn in trace.turns:
        row = known[turn.id]
        assert row["prompt_tokens"] == trace.prompt_tokens(turn)
        assert len(row["token_ids"]) == turn.answer.tokens
        assert 0 < row["ttft_s"] < row["end_s"] - row["sent_s"] + 1e-6
        begin = max((known[other]["end_s"] for other in turn.after), default=0.0)
        assert row["sent_s"] >= begin + turn.pause_s


def test_answers_are_those_of_the_prompts_alone(trace, model, replayed):
    known = prompts(trace, random_ids(model.geometry.vocab_size))
    llm = LLM(model, num_blocks=60, prefix_caching=False)
    for row in replayed[::5]:
        tokens = SamplingParams(max_tokens=len(row["token_ids"]), temperature=0.0, ignore_eos=True)
        alone = llm.generate([known[row["session"], row["turn"]]], tokens)[0].outputs[0].token_ids
        assert alone[:2] == row["token_ids"][:2]


def test_sums(replayed):
    found = summary(replayed)
    assert found["turns"] == len(replayed)
    assert found["prompt_tokens"] == sum(row["prompt_tokens"] for row in replayed)
    assert 0 < found["cached_share"] < 1
    assert found["ttft_p50_s"] <= found["ttft_p95_s"] <= max(row["ttft_s"] for row in replayed)
    assert found["seconds"] == max(row["end_s"] for row in replayed)


def test_a_changed_token_is_found(replayed):
    run = {"turns": replayed}
    assert differences(run, run) == []
    other = copy.deepcopy(run)
    row = other["turns"][3]
    row["token_ids"][1] += 1
    (one,) = differences(run, other)
    assert (one["session"], one["turn"]) == (row["session"], row["turn"])
    assert one["before"] == replayed[3]["token_ids"][:1]
    assert one["found"] == [one["expected"][0] + 1]


def test_a_variants_row_has_medians_of_its_runs(replayed):
    class Variant:
        name, options = "a", '{"kv": "int8"}'

    facts = {
        "commit": "x",
        "kv": "int8",
        "pool_blocks": [60],
        "demand_blocks": 200,
        "peak_rss_bytes": 7,
        "cpu_s": 1,
    }
    slow = [row | {"end_s": 3 * row["end_s"]} for row in replayed]
    slower = [row | {"end_s": 9 * row["end_s"]} for row in replayed]
    runs = {"a": [{"turns": each, **facts} for each in (slower, replayed, slow)]}
    (row,) = rows([Variant], runs)
    assert row["seconds"] == max(one["end_s"] for one in slow)
    assert len(row["runs"]) == 3
