"""The engine's receipts say where a prompt left what is cached, and why."""

from typing import Any

import pytest

from kvq.blockmgr import PrefixMiss
from kvq.engine import LLM, RequestOutput, SamplingParams
from kvq.scheduler import Priority
from tests.engine.kit import BLOCK, drive, engine, pair, submit
from tests.helpers_hybrids import hybrid, tokens

ONE = SamplingParams(max_tokens=1)


def small(**options: Any) -> LLM:
    return engine(pair("llama")[0], **options)


def run(llm: LLM, prompt: list[int], params: SamplingParams = ONE, **options: Any) -> RequestOutput:
    _, collector = submit(llm, prompt, params, **options)
    drive(llm, [prompt])
    assert collector.output.error is None
    return collector.output


def miss(llm: LLM, prompt: list[int], params: SamplingParams = ONE, **options: Any) -> PrefixMiss | None:
    return run(llm, prompt, params, **options).receipt.miss


def test_a_repeated_prompt_misses_nothing_and_a_longer_one_is_new_text() -> None:
    llm, prompt = small(), tokens(4 * BLOCK, seed=1)
    assert miss(llm, prompt) == PrefixMiss(cause="new_text", token=0)
    assert miss(llm, prompt) is None
    assert miss(llm, prompt + tokens(9, seed=2)) == PrefixMiss(cause="new_text", token=4 * BLOCK)
    assert llm.core.scheduler.snapshot().misses == {"new_text": 2}


def test_changed_text_and_its_place() -> None:
    llm, prompt = small(), tokens(4 * BLOCK, seed=1)
    run(llm, prompt)
    other = [*prompt[:21], prompt[21] % 90 + 3 if prompt[21] != 80 else 81, *prompt[22:]]
    assert miss(llm, other) == PrefixMiss(cause="changed_text", token=21)
    texts = [(2, 18), (24, 60)]
    other[21] += 1
    assert miss(llm, other, texts=texts) == PrefixMiss(cause="template", token=21, message=2, part="template")
    texts = [(2, 30), (34, 60)]
    other[21] += 1
    assert miss(llm, other, texts=texts) == PrefixMiss(cause="changed_text", token=21, message=1, part="text")
    assert llm.core.scheduler.snapshot().misses == {"new_text": 1, "changed_text": 2, "template": 1}


def test_salts_of_one_tenant() -> None:
    llm, prompt = small(), tokens(2 * BLOCK, seed=1)
    run(llm, prompt, tenant="a", cache_salt="x")
    assert miss(llm, prompt, tenant="a", cache_salt="y") == PrefixMiss(cause="salt", token=0)
    assert miss(llm, prompt, tenant="b", cache_salt="y") == PrefixMiss(cause="new_text", token=0)


@pytest.mark.parametrize("mine", [True, False])
def test_evicted_when_and_for_whom(mine: bool) -> None:
    llm, prompt = small(num_blocks=16), tokens(6 * BLOCK, seed=1)
    run(llm, prompt, tenant="a")
    run(llm, tokens(14 * BLOCK, seed=2), tenant="a" if mine else "b", request_id="the large one")
    found = miss(llm, prompt, tenant="a")
    assert found is not None
    assert found.cause == "evicted"
    assert found.evicted_for == ("the large one" if mine else "another tenant")
    assert found.token + found.lost_tokens == len(prompt)
    assert found.lost_tokens >= 4 * BLOCK
    assert found.seconds_ago is not None
    assert 0 <= found.seconds_ago < 600


def test_log_probabilities_of_a_prompt_limit_reuse() -> None:
    llm, prompt = small(), tokens(2 * BLOCK, seed=1)
    run(llm, prompt)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=9)
    assert miss(llm, prompt, params) == PrefixMiss(cause="limit", token=8)


def test_prefix_caching_that_is_off() -> None:
    llm, prompt = small(prefix_caching=False), tokens(2 * BLOCK, seed=1)
    run(llm, prompt)
    assert miss(llm, prompt) == PrefixMiss(cause="off", token=0)


def test_what_tiers_lost_and_other_formats() -> None:
    llm, prompt = small(), tokens(2 * BLOCK, seed=1)
    misses = llm.core.scheduler.manager.misses
    query = llm.core.scheduler.manager.prompt(prompt)
    run(llm, prompt)
    llm.core.scheduler.manager.drop_cached()
    misses.lose([llm.core.scheduler.manager.blocks.index.digest_at(query, 0)], "too_old")
    found = miss(llm, prompt)
    assert found is not None
    assert (found.cause, found.token) == ("too_old", 0)
    misses.refuses = lambda prompt, index: len(prompt.tokens) == 3 * BLOCK
    assert miss(llm, tokens(3 * BLOCK, seed=5)) == PrefixMiss(cause="format", token=0)


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_tokens_of_a_hybrid_without_a_state_lack_a_snapshot(family: str) -> None:
    llm, prompt = engine(hybrid(family)[0]), tokens(6 * BLOCK + 3, seed=1)
    run(llm, prompt)
    short = prompt[: 4 * BLOCK + 5]  # no state was kept after these
    assert miss(llm, short) == PrefixMiss(cause="no_snapshot", token=0, lost_tokens=4 * BLOCK)
    assert miss(llm, prompt[: 6 * BLOCK] + tokens(9, seed=3)) == PrefixMiss(cause="new_text", token=6 * BLOCK)


def test_a_miss_is_told_once_although_a_request_is_preempted() -> None:
    llm = small(num_blocks=16)
    long = SamplingParams(max_tokens=7 * BLOCK)
    jobs = [submit(llm, tokens(3 * BLOCK, seed=i), long, priority=Priority.BATCH) for i in range(3)]
    drive(llm, jobs)
    assert sum(collector.output.receipt.preemptions for _, collector in jobs)
    assert [collector.output.receipt.miss for _, collector in jobs] == [
        PrefixMiss(cause="new_text", token=0)
    ] * 3
    assert llm.core.scheduler.snapshot().misses == {"new_text": 3}
