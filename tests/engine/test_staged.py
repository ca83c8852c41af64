"""Tokens that wait unquantized: how a request came to its blocks changes nothing, nothing is lost."""

import pytest

from kvq.engine import SamplingParams
from kvq.errors import RequestError
from kvq.layout import BLOCK_SIZE, Role
from kvq.models import load
from kvq.sizing.pools import PoolPlan, at_once, longest_context
from tests.engine.kit import assert_balanced, engine, mixed_prompts, pair, tokens_of
from tests.engine.test_equality import QUANTIZED_GAP, check_near_ties
from tests.helpers_models import random_tokens

STAGED = [
    *("int4_mean", "int3_mean+recent=20"),
    *("int4+sinks=4+recent=5", "int8/int4_mean+sinks=17+recent=33"),
]
NEW = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=2)
# Prompts in several chunks; preemptions, with host memory and without; prefixes taken and waited for.
WAYS = [
    {"max_num_batched_tokens": 19},
    {"num_blocks": 14, "max_context": 112},
    {"num_blocks": 14, "max_context": 112, "kv_host": "4MiB"},
    {},
]


@pytest.mark.daily(3)
@pytest.mark.parametrize(
    ("kv", "family"),
    [
        *((kv, "llama") for kv in STAGED),
        *((STAGED[3], "gemma3_text"), (STAGED[2], "gpt_oss")),
        *(pytest.param(kv, "gemma3_text", marks=pytest.mark.long) for kv in STAGED[:3]),
        *(pytest.param(kv, "gpt_oss", marks=pytest.mark.long) for kv in (*STAGED[:2], STAGED[3])),
    ],
)
def test_tokens_are_those_of_one_by_one_runs_but_for_near_ties(kv, family):
    model = pair(family)[0].with_kv(kv)
    prompts = mixed_prompts(8, seed=5, longest=70)
    prompts += [[*prompts[0], *prompts[1]][:71], prompts[0]]
    alone = engine(model, max_num_seqs=1, prefix_caching=False).generate(prompts, NEW)
    seen = 0
    for options in WAYS:
        llm = engine(model, **options)
        for _ in range(2):
            seen += check_near_ties(alone, llm.generate(prompts, NEW), gap=QUANTIZED_GAP)
        assert_balanced(llm)
    assert seen <= 8, f"{seen} of 80 results differ from those of one-by-one runs"


@pytest.mark.parametrize("kv", STAGED)
def test_a_prompt_that_came_before_is_found_up_to_the_tokens_that_are_not_sealed(kv):
    model = pair("llama")[0].with_kv(kv)
    llm = engine(model)
    prompt = mixed_prompts(1, seed=6, longest=90)[0] * 3
    prompt = prompt[:90]
    first = llm.generate([prompt], SamplingParams(max_tokens=1, logprobs=2))
    again = llm.generate([prompt], SamplingParams(max_tokens=1, logprobs=2))
    size, recent = model.layout.block_size, model.layout.exact.recent
    assert again[0].receipt.cached_tokens == (90 - recent) // size * size
    assert tokens_of(first) == tokens_of(again)


@pytest.mark.parametrize("kv", STAGED[1:3])
def test_several_results_of_a_prompt_are_those_of_requests_of_their_own(kv):
    model = pair("llama")[0].with_kv(kv)
    prompt = mixed_prompts(1, seed=7, longest=50)[0]
    llm = engine(model, num_blocks=40)
    [output] = llm.generate(
        [prompt], SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)
    )
    alone = engine(model, max_num_seqs=1)
    [other] = alone.generate(
        [prompt], SamplingParams(n=1, temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)
    )
    assert output.outputs[0].token_ids == other.outputs[0].token_ids
    beams = SamplingParams(max_tokens=50, beam_width=3)
    assert tokens_of(llm.generate([prompt], beams)) == tokens_of(engine(model).generate([prompt], beams))
    assert_balanced(llm)


def test_the_pools_are_accounted_for_group_by_group():
    model = pair("llama")[0].with_kv("int3_mean+sinks=4+recent=32")
    llm = engine(model)
    layout = model.layout
    assert [group.role for group in layout.groups] == [Role.SEALED, Role.RECENT, Role.SINKS]
    counts = llm.core.runner.cache.num_blocks
    total = sum(group.pool_bytes(count) for group, count in zip(layout.groups, counts, strict=True))
    assert llm.core.runner.cache.nbytes == total


@pytest.mark.daily(4)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("kv", ["bf16", "int4_mean", "int3_mean+sinks=17+recent=33"])
def test_a_receipt_tells_the_bytes_that_were_taken_at_the_peak(monkeypatch, kv, family):
    """Alone in its pools a request holds what is live in them: counted after every growth, by the pools."""
    llm = engine(pair(family)[0].with_kv(kv), max_num_batched_tokens=50, prefix_caching=False)
    layout, tables = llm.model.layout, llm.core.scheduler.manager._tables
    make_room, live = tables.make_room, []

    def watched(work):
        make_room(work)
        held = zip(llm.core.scheduler.manager.usage(), layout.groups, strict=True)
        live.append(sum(usage.live * group.block_bytes for usage, group in held))

    monkeypatch.setattr(tables, "make_room", watched)
    [output] = llm.generate([random_tokens(150, seed=9)], SamplingParams(max_tokens=30, ignore_eos=True))
    assert output.receipt.peak_bytes == max(live) > 0
    assert len({group.block_bytes for group in layout.groups}) > 1 or kv == "bf16"


@pytest.mark.parametrize(
    ("kv", "memory"),
    [("int4_mean", "8MiB"), ("int3+sinks=4+recent=128", "8MiB"), ("int3+recent=1024", "4MiB")],
)
def test_as_many_requests_run_side_by_side_as_are_told_to_fit_at_once(kv, memory):
    model = load("tiny", kv)
    llm = engine(model, kv_memory=memory, max_num_seqs=128)
    config, cache = llm.core.scheduler.config, llm.core.runner.cache
    pools = PoolPlan(
        num_blocks=cache.num_blocks,
        step_tokens=config.max_num_batched_tokens,
        sequences=config.max_num_seqs,
    )
    told = at_once(model.layout, pools, 100).count
    ran = []
    llm.on_step(lambda _: ran.append(llm.core.scheduler.running.num_sequences))
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    llm.generate([random_tokens(71, seed=20 + i) for i in range(told + 5)], params)
    assert max(ran) >= told > 1
    assert llm.core.scheduler.counters.preemptions <= told
    assert_balanced(llm)


@pytest.mark.parametrize(
    ("kv", "memory"), [("int3_mean+sinks=4+recent=128", "4MiB"), ("int4+sinks=64", "3MiB")]
)
def test_prompts_of_several_chunks_run_side_by_side_where_sinks_are_few(kv, memory):
    """Their first chunks take all the sinks that they will ever have."""
    model = load("tiny", kv)
    llm = engine(model, kv_memory=memory, max_num_seqs=128, max_context=512)
    config, cache = llm.core.scheduler.config, llm.core.runner.cache
    pools = PoolPlan(
        num_blocks=cache.num_blocks, step_tokens=config.max_num_batched_tokens, sequences=config.max_num_seqs
    )
    told = at_once(model.layout, pools, 301).count
    ran = []
    llm.on_step(lambda _: ran.append(llm.core.scheduler.running.num_sequences))
    params = SamplingParams(max_tokens=151, ignore_eos=True)
    llm.generate([random_tokens(150, seed=20 + i) for i in range(told)], params)
    assert max(ran) == told > 1
    assert_balanced(llm)


@pytest.mark.daily(8)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("kv", ["bf16", *STAGED, "int3_mean+recent=300", "int4+sinks=400"])
def test_a_small_pool_serves_the_longest_prompt_that_is_told_and_refuses_a_longer_one(kv, family):
    model = pair(family)[0].with_kv(kv)
    least = sum(group.block_bytes for group in model.layout.groups)
    for blocks in (1, 4, 9):
        llm = engine(model, kv_memory=blocks * least, max_num_seqs=4, max_num_batched_tokens=64)
        config = llm.core.scheduler.config
        pools = PoolPlan(
            num_blocks=[pool.num_blocks for pool in llm.core.scheduler.manager.pools],
            step_tokens=config.max_num_batched_tokens,
            sequences=config.max_num_seqs,
        )
        assert min(pools.num_blocks) > 0
        longest = longest_context(model.layout, pools, llm.core.max_context)
        longest = min(longest, llm.core.max_context - 1)
        [output] = llm.generate([random_tokens(longest, seed=10)], SamplingParams(max_tokens=1))
        assert output.error is None
        with pytest.raises(RequestError, match=r"can never fit|are more than the context"):
            llm.generate([random_tokens(longest + 1, seed=10)], SamplingParams(max_tokens=1))
        assert_balanced(llm)


@pytest.mark.parametrize("kv", ["int4_mean", "int3+sinks=4+recent=128"])
def test_a_small_pool_takes_prompts_that_are_longer_than_its_staging_area(kv):
    model = load("tiny", kv)
    llm = engine(model, kv_memory="4MiB", max_context=2048)
    sealed, recent = llm.core.runner.cache.num_blocks[:2]
    assert recent * BLOCK_SIZE < 1000 < sealed * BLOCK_SIZE
    prompt = random_tokens(1500, seed=8)
    results = [x.generate([prompt], NEW) for x in (llm, engine(model, kv_memory="256MiB"))]
    check_near_ties(*results, gap=QUANTIZED_GAP)
    assert_balanced(llm)
