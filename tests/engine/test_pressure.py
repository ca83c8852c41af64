"""Full pools: nobody starves, nothing leaks, nothing grows."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvq.engine import Priority, SamplingParams
from kvq.errors import RequestError
from tests.engine.kit import (
    BLOCK,
    Collector,
    assert_balanced,
    count_near_ties,
    drive,
    engine,
    mixed_prompts,
    pair,
    reference_tokens,
    submit,
    tokens_of,
)
from tests.helpers_models import random_tokens

POOL = 12  # blocks
SLOTS = POOL * BLOCK
SMALL = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return pair("llama")[0]


def small_prompts():
    return mixed_prompts(20, seed=90, longest=40)


@pytest.mark.parametrize("beside", [-1, 0])
@pytest.mark.parametrize("new", [1, 40])
@pytest.mark.parametrize("kv_host", [0, "4MiB"])
def test_a_request_as_large_as_the_pool_and_20_small_ones_behind_it_all_finish(model, beside, new, kv_host):
    llm = engine(model, num_blocks=POOL, kv_host=kv_host)
    length = SLOTS + beside - new + 1  # the last generated token takes no slot
    prompt = random_tokens(length, seed=91)
    big = submit(llm, prompt, SamplingParams(max_tokens=new, ignore_eos=True))
    small = [submit(llm, tokens, SMALL) for tokens in small_prompts()]
    drive(llm, small)
    assert len(tokens_of([big[1].output])[0]) == new
    assert [len(tokens) for tokens in tokens_of([c.output for _, c in small])] == [8] * 20
    assert_balanced(llm)


@pytest.mark.parametrize("new", [1, 40])
def test_a_request_one_token_larger_than_the_pool_is_refused_at_once_with_the_numbers(model, new):
    llm = engine(model, num_blocks=POOL)
    length = SLOTS + 1 - new + 1
    numbers = (
        f"{length} prompt tokens and max_tokens={new} need {POOL + 1} blocks of {BLOCK} tokens, .* {POOL}"
    )
    with pytest.raises(RequestError, match=numbers):
        submit(llm, random_tokens(length, seed=91), SamplingParams(max_tokens=new))
    assert not llm.core.has_work
    assert [output.error for output in llm.generate(small_prompts(), SMALL)] == [None] * 20
    assert_balanced(llm)


@pytest.mark.parametrize("kv_host", [0, "4MiB"])
def test_a_request_without_a_limit_grows_to_the_whole_pool_and_small_ones_finish(model, kv_host):
    llm = engine(model, num_blocks=POOL, kv_host=kv_host)
    endless = SamplingParams(max_tokens=None, ignore_eos=True)
    big = submit(llm, random_tokens(9, seed=92), endless)
    small = [submit(llm, tokens, SMALL) for tokens in small_prompts()]
    drive(llm, small)
    output = big[1].output
    assert len(output.outputs[0].token_ids) == SLOTS - 9 + 1
    assert output.outputs[0].finish_reason == "length"
    assert output.receipt.peak_blocks == POOL
    assert [len(tokens) for tokens in tokens_of([c.output for _, c in small])] == [8] * 20
    assert_balanced(llm)


def test_two_endless_requests_that_outgrow_the_pool_take_turns_and_end_with_the_right_tokens(model):
    llm = engine(model, num_blocks=POOL)
    reference = pair("llama")[1]
    prompts = [random_tokens(20, seed=93 + i) for i in range(2)]
    count = SLOTS - 20 + 1
    got = tokens_of(llm.generate(prompts, SamplingParams(max_tokens=None, ignore_eos=True)))
    assert [len(tokens) for tokens in got] == [count] * 2
    wanted = [reference_tokens(reference, prompt, count, eos_token_id=None) for prompt in prompts]
    assert count_near_ties(reference, prompts, wanted, got) <= 1
    assert llm.core.scheduler.counters.preemptions > 0
    assert_balanced(llm)


def test_batch_requests_are_not_starved_by_interactive_ones_that_keep_coming(model):
    llm = engine(model, num_blocks=16, max_num_seqs=2, aging_s=0.05)
    patient = submit(llm, [5, 6, 7], SMALL, priority=Priority.BATCH)[1]
    prompts = iter(mixed_prompts(4000, seed=94, longest=10))
    for _ in range(4000):
        while len(llm.core.jobs) < 8:
            submit(llm, next(prompts), SMALL)
        llm.step()
        if any(piece.output is not None for piece in patient.pieces):
            break
    assert patient.output.error is None


def check_random_life(model, count: int, seed: int, **options) -> None:
    """Requests of every kind come, run and are cancelled; all is balanced whenever nothing runs."""
    rng = random.Random(seed)
    llm = engine(model, num_blocks=64, max_num_seqs=24, max_num_batched_tokens=128, **options)
    shared = [random_tokens(48, seed=seed + i) for i in range(4)]
    live: list[list] = []  # job, collector, steps until it is cancelled
    ended: list[Collector] = []
    started = 0
    while started < count:
        for _ in range(min(rng.randint(1, 12), count - started, 40 - len(live))):
            patience = rng.randint(0, 40) if rng.random() < 0.3 else -1
            live.append([*submit(llm, *random_request(rng, shared), tenant=rng.choice("ab")), patience])
            started += 1
        for entry in live:
            if entry[2] == 0:
                llm.core.cancel(entry[0])
            entry[2] -= 1
        llm.step()
        ended += [entry[1] for entry in live if is_over(entry[1])]
        live = [entry for entry in live if not is_over(entry[1])]
        if started % 100 == 0:
            llm.core.scheduler.manager.check_integrity()
    drive(llm, live)
    ended += [entry[1] for entry in live]
    assert len(ended) == count
    reasons = [{r.finish_reason for r in collector.output.outputs} for collector in ended]
    assert 0.1 * count < sum("cancelled" in found for found in reasons) < 0.4 * count
    assert not any("error" in found for found in reasons)
    counters = llm.core.scheduler.counters
    assert counters.ended == count
    assert counters.preemptions > 0
    restored = sum(collector.output.receipt.restored_tokens for collector in ended)
    assert restored > 0 or "kv_host" not in options
    assert not restored or {"kv_host", "kv_ladder"} & options.keys()
    assert_balanced(llm)
    llm.core.scheduler.manager.drop_cached()
    assert all(pool.free == pool.total for pool in llm.core.scheduler.manager.usage())


def is_over(collector):
    return bool(collector.pieces) and collector.pieces[-1].output is not None


def random_request(rng, shared):
    prompt = random_tokens(rng.randint(1, 60), seed=rng.randrange(1 << 30))
    if rng.random() < 0.5:
        prompt = rng.choice(shared)[: rng.randint(8, 48)] + prompt[:20]
    params = SamplingParams(
        max_tokens=rng.randint(1, 90), temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(1 << 30)
    )
    kind = rng.random()
    if kind < 0.15:
        params = replace(params, n=rng.randint(2, 4), repetition_penalty=1.1)
    elif kind < 0.25:
        params = SamplingParams(max_tokens=rng.randint(1, 12), beam_width=rng.randint(2, 3))
    elif kind < 0.35:
        params = replace(params, prompt_logprobs=1, logprobs=2)
    return prompt, params


def test_500_requests_of_all_kinds_with_random_cancels_leak_nothing(model):
    check_random_life(model, 500, seed=7, kv_host="4MiB")


def test_300_requests_in_steps_that_are_launched_ahead_leak_nothing(model):
    check_random_life(model, 300, seed=9, async_scheduling=True)


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"kv_host": "4MiB"}, {"async_scheduling": True}])
def test_10000_requests_of_all_kinds_with_random_cancels_leak_nothing(model, options):
    check_random_life(model, 10_000, seed=8, **options)


def test_sliding_windows_under_pressure_leak_nothing():
    model, reference = pair("gemma3_text")
    llm = engine(model, num_blocks=14, max_num_batched_tokens=48, max_context=128)
    prompts = mixed_prompts(12, seed=95, longest=80)
    got = tokens_of(llm.generate(prompts, SamplingParams(max_tokens=20)))
    wanted = [reference_tokens(reference, prompt, 20) for prompt in prompts]
    assert count_near_ties(reference, prompts, wanted, got) <= 1
    assert llm.core.scheduler.counters.preemptions > 0
    assert_balanced(llm)


def check_limits(seed: int, **options) -> None:
    """A random engine with a pool of a few blocks: whatever it accepts finishes, and nothing leaks."""
    rng = random.Random(seed)
    model, _ = pair(rng.choice(["llama", "gemma3_text", "gpt_oss"]))
    llm = engine(
        model,
        **{
            "num_blocks": rng.randint(2, 9),
            "max_num_batched_tokens": rng.choice([6, 16, 33, 300]),
            "max_num_seqs": rng.choice([4, 6]),
            **rng.choice([{"prefix_caching": False}, {}, {"kv_host": "16KiB"}, {"kv_host": "1MiB"}]),
            **options,
        },
    )
    accepted: list[tuple] = []
    refusals: list[str] = []
    for i in range(rng.choice([1, 3, 6])):
        params = SamplingParams(max_tokens=rng.choice([None, 5, 40]), ignore_eos=rng.random() < 0.8)
        kind = rng.random()
        if kind < 0.4:
            params = replace(params, n=rng.choice([2, 4]), temperature=1.0, seed=i)
        elif kind < 0.6:
            params = replace(params, beam_width=rng.choice([2, 4]), max_tokens=15)
        try:
            accepted.append(submit(llm, random_tokens(rng.randint(1, 100), seed=100 * seed + i), params))
        except RequestError as error:
            refusals.append(str(error))
    drive(llm, accepted, most_steps=5000)
    assert all("can never fit" in refusal for refusal in refusals)
    assert [collector.output.error for _, collector in accepted] == [None] * len(accepted)
    assert_balanced(llm)


def test_whatever_is_accepted_finishes_at_the_limits_of_small_pools():
    for seed in range(12):
        check_limits(seed)


@pytest.mark.long
def test_whatever_is_accepted_finishes_at_the_limits_of_many_small_pools():
    for seed in range(100, 600):
        check_limits(seed)


def memory_bytes() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="resident memory is read from /proc")
def test_after_a_warm_up_steps_allocate_nothing_that_stays(model):
    llm = engine(model, kv_host="1MiB")
    prompts = mixed_prompts(8, seed=96, longest=20)
    endless = SamplingParams(max_tokens=230, ignore_eos=True, temperature=1.0)
    jobs = [submit(llm, prompt, endless) for prompt in prompts]
    for _ in range(25):
        llm.step()
    tensors = pool_tensors(llm)
    before, addresses = memory_bytes(), [tensor.data_ptr() for tensor in tensors]
    for _ in range(200):
        llm.step()
    assert [tensor.data_ptr() for tensor in pool_tensors(llm)] == addresses
    assert memory_bytes() - before < 8 << 20
    assert llm.core.has_work
    for job, _ in jobs:
        llm.core.cancel(job)
    assert_balanced(llm)


def pool_tensors(llm):
    """The pools, and the tables of the runner."""
    pools = [value for pool in llm.core.runner.cache._pools for value in vars(pool).values()]
    tensors = [value for value in pools if isinstance(value, torch.Tensor)]
    assert sum(tensor.nbytes for tensor in tensors) >= llm.core.runner.cache.nbytes > 0, "all of the pools"
    return [*tensors, *llm.core.runner._tables.there]
