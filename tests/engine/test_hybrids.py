"""Models with layers that keep a state: the tokens of Transformers' `generate`, whatever happens to it."""

import logging
import math
import random
from functools import cache
from typing import Any

import pytest
import torch

from kvq.cache.prefix_file import load_prefix, save_prefix
from kvq.engine import LLM, SamplingParams
from kvq.errors import ConfigError, NumericalError
from kvq.layout import Role
from kvq.models import load
from tests.engine.kit import (
    assert_balanced,
    count_near_ties,
    damage_host,
    drive,
    engine,
    mixed_prompts,
    preempt,
    reference_logprobs,
    reference_tokens,
    submit,
    tokens_of,
)
from tests.engine.test_pressure import check_random_life
from tests.helpers_hybrids import OTHERS, QUICK, hybrid, hybrid_folder, tokens

NEW = 12  # tokens per result
GREEDY = SamplingParams(max_tokens=NEW)
MARK = 190  # a token that only the victim has

every_family = pytest.mark.parametrize(
    "family", [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)]
)


@cache
def expected(family: str, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and what transformers' own `generate` adds to them."""
    prompts = mixed_prompts(count, seed=7)
    return prompts, [reference_tokens(hybrid(family)[1], prompt, NEW) for prompt in prompts]


def check(family: str, llm: LLM, count: int, *, runs: int = 1) -> None:
    """The tokens of prompts that come at once; a second run finds the states of the first."""
    prompts, wanted = expected(family, count)
    for _ in range(runs):
        got = tokens_of(llm.generate(prompts, GREEDY))
        assert count_near_ties(hybrid(family)[1], prompts, wanted, got) <= 1
    assert_balanced(llm)


# Tokens


@pytest.mark.daily(3)
@every_family
@pytest.mark.parametrize(("num_blocks", "chunk"), [(12, 40), (200, 512)])
def test_tokens_are_those_of_generate_through_small_pools_and_chunks(family, num_blocks, chunk):
    llm = engine(hybrid(family)[0], num_blocks=num_blocks, max_num_batched_tokens=chunk, snapshot_every=32)
    check(family, llm, 20, runs=2)
    counters = llm.core.scheduler.counters
    assert (counters.preemptions > 0) == (num_blocks == 12)
    assert num_blocks == 12 or counters.cached_tokens > 300, "states were not found again"


@pytest.mark.long
@pytest.mark.parametrize("family", [*QUICK, *OTHERS])
def test_the_tokens_of_100_prompts_are_those_of_generate(family):
    llm = engine(hybrid(family)[0], num_blocks=40, max_num_batched_tokens=64, kv_host="8MiB")
    check(family, llm, 100, runs=2)


@every_family
@pytest.mark.parametrize("to_host", [True, False])
def test_preemption_between_any_two_steps_changes_no_token(family, to_host):
    model, reference = hybrid(family)
    llm = engine(model, num_blocks=64, kv_host="16MiB", max_num_batched_tokens=33, snapshot_every=16)
    prompts, wanted = expected(family, 20)
    prompts, wanted = prompts[:10], wanted[:10]
    collectors = [submit(llm, prompt, GREEDY)[1] for prompt in prompts]
    rng, scheduler = random.Random(3), llm.core.scheduler
    for now in range(4000):
        if not llm.core.has_work:
            break
        llm.step()
        if now < 40 and scheduler.running.requests:
            request = rng.choice(list(scheduler.running.requests))
            preempt(llm, request, float(now), to_host=to_host)
    assert scheduler.counters.preemptions > 10
    got = tokens_of([collector.output for collector in collectors])
    assert count_near_ties(reference, prompts, wanted, got) <= 1
    assert_balanced(llm)


@pytest.mark.parametrize("family", QUICK)
def test_several_results_of_a_prompt_each_go_on_from_their_own_state(family):
    model, reference = hybrid(family)
    llm = engine(model, num_blocks=60, max_num_batched_tokens=24)
    params = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=20, logprobs=1, ignore_eos=True)
    for output in llm.generate([tokens(n, seed=n) for n in (15, 16, 33)], params):
        assert len({tuple(result.token_ids) for result in output.outputs}) == 4
        for result in output.outputs:
            whole = [*output.prompt_token_ids, *result.token_ids]
            wanted = reference_logprobs(reference, whole)[len(output.prompt_token_ids) - 1 : -1]
            for token, entry, row in zip(result.token_ids, result.logprobs, wanted, strict=True):
                assert entry.logprob == pytest.approx(float(row[token]), abs=2e-4)
    assert_balanced(llm)


@pytest.mark.parametrize("family", QUICK)
def test_beams_are_those_of_beams_that_are_computed_in_full(family):
    model, reference = hybrid(family)
    llm = engine(model, num_blocks=80, max_num_batched_tokens=24)
    for output in llm.generate(
        [tokens(n, seed=n) for n in (7, 32)], SamplingParams(beam_width=3, max_tokens=10, n=3)
    ):
        for result in output.outputs:
            whole = [*output.prompt_token_ids, *result.token_ids]
            wanted = reference_logprobs(reference, whole)[len(output.prompt_token_ids) - 1 : -1]
            total = sum(float(row[token]) for row, token in zip(wanted, result.token_ids, strict=True))
            assert result.cumulative_logprob == pytest.approx(total, abs=2e-3)
    assert_balanced(llm)


@pytest.mark.parametrize("family", QUICK)
def test_steps_that_are_launched_ahead_read_the_states_of_those_before(family):
    llm = engine(hybrid(family)[0], async_scheduling=True, num_blocks=60, snapshot_every=16)
    check(family, llm, 20, runs=2)


# Prefixes


@pytest.mark.parametrize("family", QUICK)
def test_a_prompt_that_is_asked_again_starts_behind_its_last_whole_block(family):
    llm = engine(hybrid(family)[0])
    prompt = tokens(100, seed=1)
    first, again = (llm.generate([prompt], GREEDY)[0] for _ in range(2))
    assert first.receipt.cached_tokens == 0
    assert again.receipt.cached_tokens == 96
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert_balanced(llm)


@pytest.mark.parametrize("family", QUICK)
def test_a_conversation_goes_on_from_the_states_of_its_turns(family):
    model, reference = hybrid(family)
    llm = engine(model, snapshot_every=32)
    talk = tokens(45, seed=2)
    for turn in range(4):
        output = llm.generate([talk], SamplingParams(max_tokens=20, ignore_eos=True))[0]
        wanted = reference_tokens(reference, talk, 20, eos_token_id=None)
        assert count_near_ties(reference, [talk], [wanted], [output.outputs[0].token_ids]) == 0
        assert output.receipt.cached_tokens == (len(talk) - 20 - 9 + 19) // 32 * 32 * (turn > 0) or turn == 0
        talk = talk + output.outputs[0].token_ids + tokens(9, seed=10 + turn)
    assert_balanced(llm)


@pytest.mark.parametrize("family", QUICK)
def test_equal_prompts_that_come_together_compute_their_states_once(family):
    llm = engine(hybrid(family)[0], max_num_batched_tokens=48)
    prompt = tokens(110, seed=3)
    outputs = llm.generate([prompt] * 6, GREEDY)
    assert [output.receipt.cached_tokens for output in outputs] == [0] + [96] * 5
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert_balanced(llm)


def test_without_prefix_caching_no_state_is_kept():
    llm = engine(hybrid("lfm2")[0], prefix_caching=False)
    llm.generate([tokens(100, seed=1)] * 2, GREEDY)
    assert [usage.cached for usage in llm.core.scheduler.manager.usage()] == [0, 0]
    assert llm.core.scheduler.counters.cached_tokens == 0


# Faults


@pytest.mark.parametrize("family", QUICK)
@pytest.mark.parametrize("layer", [0, -1])
def test_a_step_that_raises_is_run_again_from_the_states_before_it(family, layer, caplog):
    model, reference = hybrid(family)
    prompts, wanted = (items[:6] for items in expected(family, 20))
    llm, calls = engine(model, max_num_batched_tokens=64), 0

    def raising(_module: Any, _inputs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls % 5 == 0:
            raise RuntimeError("now and then")

    hook = list(model.weights.model.model.layers)[layer].register_forward_pre_hook(raising)
    try:
        with caplog.at_level(logging.CRITICAL, "kvq"):
            outputs = llm.generate(prompts, GREEDY)
    finally:
        hook.remove()
    fine = [i for i, output in enumerate(outputs) if output.error is None]
    assert len(fine) >= 2
    got = [output.outputs[0].token_ids for output in outputs]
    kept = [[items[i] for i in fine] for items in (prompts, wanted, got)]
    assert count_near_ties(reference, *kept) == 0
    assert_balanced(llm)


@pytest.mark.parametrize("family", QUICK)
def test_a_state_that_is_not_finite_ends_its_request_alone_and_is_scrubbed(family):
    model, _ = hybrid(family)
    prompts = [[t if t != MARK else 3 for t in tokens(20 + 10 * i, seed=40 + i)] for i in range(5)]
    params = SamplingParams(max_tokens=10, ignore_eos=True, logit_bias={MARK: -100.0})
    wanted = tokens_of(engine(model).generate([p for i, p in enumerate(prompts) if i != 2], params))
    prompts[2][25] = MARK
    llm = engine(model)
    embedding = model.weights.model.get_input_embeddings()

    def poison(_module: Any, inputs: Any, out: torch.Tensor) -> torch.Tensor:
        return torch.where((inputs[0] == MARK)[..., None], math.nan, out)

    hook = embedding.register_forward_hook(poison)
    try:
        outputs = llm.generate(prompts, params)
    finally:
        hook.remove()
    assert isinstance(outputs[2].error, NumericalError)
    assert tokens_of([o for i, o in enumerate(outputs) if i != 2]) == wanted
    core = llm.core
    core.runner.cache.carry_out(core.scheduler.manager.take_orders())
    group = model.layout.states.group.index
    for block in range(core.scheduler.manager.pools[group].num_blocks):
        rows = core.runner.cache.states.read(model.geometry.states[0].number, torch.tensor([block]))
        assert all(bool(value.isfinite().all()) for value in rows.values())
    assert_balanced(llm)


def test_states_damaged_in_host_memory_are_computed_again():
    model, reference = hybrid("falcon_h1")
    llm = engine(model, kv_host="16MiB", snapshot_every=16)
    prompts, wanted = (items[:6] for items in expected("falcon_h1", 20))
    collectors = [submit(llm, prompt, GREEDY)[1] for prompt in prompts]
    for _ in range(5):
        llm.step()
    for request in list(llm.core.scheduler.running.requests):
        preempt(llm, request, to_host=True)
    assert damage_host(llm, model.layout.states.group.index) > 0
    drive(llm, collectors)
    assert count_near_ties(reference, prompts, wanted, tokens_of([c.output for c in collectors])) == 0
    assert sum(c.output.receipt.recomputed_tokens for c in collectors) > 0
    assert llm.core.scheduler.manager.blocks.tiers.num_damaged > 0
    assert_balanced(llm)


# Leaks


@pytest.mark.parametrize("options", [{}, {"kv_host": "8MiB"}])
def test_150_requests_of_all_kinds_with_random_cancels_leak_nothing(options):
    check_random_life(hybrid("lfm2")[0], 150, seed=8, snapshot_every=32, **options)


@pytest.mark.long
@pytest.mark.parametrize("family", [*QUICK, "granitemoehybrid", "nemotron_h", "olmo_hybrid"])
@pytest.mark.parametrize("options", [{}, {"kv_host": "8MiB"}, {"async_scheduling": True}])
def test_10000_requests_of_all_kinds_with_random_cancels_leak_nothing(family, options):
    check_random_life(hybrid(family)[0], 10_000, seed=8, snapshot_every=32, **options)


# Formats and memory


@pytest.mark.daily(4)
@pytest.mark.parametrize("kv", ["int8", "int4", "int8+recent=32+sinks=4"])
@pytest.mark.parametrize("family", QUICK)
def test_quantized_kv_beside_states_gives_the_same_tokens_in_any_batch(family, kv):
    model = hybrid(family)[0].with_kv(kv)
    prompts, _ = expected(family, 20)
    alone = [tokens_of(engine(model).generate([prompt], GREEDY))[0] for prompt in prompts[:4]]
    together = engine(model, num_blocks=40, max_num_batched_tokens=64, snapshot_every=32)
    for _ in range(2):
        got = tokens_of(together.generate(prompts[:4], GREEDY))
        assert sum(a != b for a, b in zip(got, alone, strict=True)) <= 1
    assert_balanced(together)


@every_family
def test_memory_of_states_is_reported_as_it_is_allocated(family):
    model, _ = hybrid(family)
    llm = engine(model, num_blocks=32, max_num_seqs=4)
    layout, cache = model.layout, llm.core.runner.cache
    states = layout.states
    assert [group.role for group in layout.groups][-1] is Role.STATES
    plain = model.geometry.state_bytes(4)
    assert plain <= states.block_bytes <= plain + 16 * len(states.states)
    blocks = [pool.num_blocks for pool in llm.core.scheduler.manager.pools]
    assert blocks[-1] == 12
    assert cache.nbytes == sum(n * g.block_bytes for n, g in zip(blocks, layout.groups, strict=True))
    output = llm.generate([tokens(40, seed=1)], GREEDY)[0]
    kv = sum(group.block_bytes for group in layout.groups[:-1])
    assert output.receipt.peak_bytes >= 3 * kv + states.block_bytes


def test_a_prefix_file_brings_the_states_at_its_end(tmp_path):
    model, reference = hybrid("falcon_h1")
    prompt = tokens(100, seed=1)
    llm, other, path = engine(model), engine(model), tmp_path / "a.kvqprefix"
    for own in (llm, other):
        own.core.scheduler.manager.blocks.index._identity = bytes(32)
    llm.generate([prompt], GREEDY)
    for own, move in ((llm, save_prefix), (other, load_prefix)):
        manager = own.core.scheduler.manager
        assert move(path, own.core.runner.cache, manager, manager.prompt(prompt)) == 96
    output = other.generate([prompt], GREEDY)[0]
    assert output.receipt.cached_tokens == 96
    wanted = [reference_tokens(reference, prompt, NEW)]
    assert count_near_ties(reference, [prompt], wanted, [output.outputs[0].token_ids]) == 0


def test_what_holds_no_states_refuses_models_that_have_some():
    with pytest.raises(ConfigError, match="keeps no recurrent states"):
        load(hybrid_folder("lfm2"), device="cpu", cache="dense")
