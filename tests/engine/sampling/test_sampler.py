"""Promises: a row is what it would be alone, bit for bit; bad rows hurt no other; nothing is left behind."""

import random

import pytest
import torch

from kvq.engine.params import SamplingParams
from kvq.engine.sampling.seeds import mix_seed
from tests.engine.sampling.reference import add, adjusted, bitmask, distribution, sampler

_ROWS = 24


def _random_params(pick: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=pick.choice([0.0, 0.3, 1.0, 2.5]),
        top_k=pick.choice([None, None, 1, 5, 1500]),
        top_p=pick.choice([1.0, 1.0, 0.9, 0.2]),
        min_p=pick.choice([0.0, 0.0, 0.1]),
        repetition_penalty=pick.choice([1.0, 1.0, 1.4]),
        frequency_penalty=pick.choice([0.0, 0.0, 0.7]),
        logit_bias=pick.choice([None, None, {3: 2.5}]),
        min_tokens=pick.choice([0, 5]),
        logprobs=pick.choice([None, 0, 4]),
        best_of=pick.choice([None, 2]),
    )


def _random_request(pick: random.Random, vocab_size: int):
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(pick.randrange(1 << 30))) * 3
    tokens = {
        "prompt": [pick.randrange(vocab_size) for _ in range(pick.randrange(90))],
        "generated": [pick.randrange(vocab_size) for _ in range(pick.randrange(90))],
        "stop_ids": [1, 2],
    }
    allowed = set(pick.sample(range(vocab_size), vocab_size // 2)) if pick.random() < 0.3 else None
    return _random_params(pick), logits, tokens, pick.randrange(1 << 64), pick.randrange(9), allowed


def _run(requests, vocab_size: int, rows: list[int]):
    target = sampler(vocab_size, _ROWS)
    masks = {}
    for place, (row, (params, _, tokens, seed, _, allowed)) in enumerate(zip(rows, requests, strict=True)):
        add(target, row, params, seed=seed, **tokens)
        if allowed is not None:
            masks[place] = bitmask(allowed, vocab_size)
    logits = torch.stack([request[1] for request in requests])
    return target.sample(logits, rows, [request[4] for request in requests], masks=masks).wait()


@pytest.mark.parametrize("vocab_size", [33, 4097])
@pytest.mark.parametrize("seed", range(4))
def test_a_row_is_the_same_alone_and_in_any_batch(vocab_size, seed):
    pick = random.Random(seed)
    requests = [_random_request(pick, vocab_size) for _ in range(_ROWS)]
    alone = [_run([request], vocab_size, [pick.randrange(_ROWS)]) for request in requests]
    for _ in range(6):
        chosen = pick.sample(range(_ROWS), k=pick.randint(2, _ROWS))
        batch = _run([requests[i] for i in chosen], vocab_size, pick.sample(range(_ROWS), k=len(chosen)))
        assert all(batch.finite)
        for place, i in enumerate(chosen):
            assert batch.tokens[place] == alone[i].tokens[0]
            assert batch.logprobs[place] == alone[i].logprobs[0]


@pytest.mark.parametrize("seed", range(3))
def test_everything_together_stays_within_the_reference(seed):
    pick = random.Random(100 + seed)
    requests = [_random_request(pick, 33) for _ in range(_ROWS)]
    got = _run(requests, 33, list(range(_ROWS)))
    for token, (params, logits, tokens, _, count, allowed) in zip(got.tokens, requests, strict=True):
        forbidden = tokens["stop_ids"] if count < params.min_tokens else ()
        scores = adjusted(logits, params, tokens["prompt"], tokens["generated"], forbidden, allowed)
        assert token in distribution(scores, params)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}], ids=str)
def test_bad_rows_are_flagged_and_their_neighbours_untouched(options):
    logits = torch.randn(6, 4097)
    good = logits.clone()
    logits[0, 17], logits[2, 4096], logits[4] = torch.nan, torch.inf, -torch.inf
    logits[5, 1:] = -torch.inf  # legal: one token is left
    good[5, 1:] = -torch.inf
    outcomes = []
    for batch in (logits, good):
        target = sampler(4097, 6)
        for row in range(6):
            add(target, row, SamplingParams(logprobs=2, **options), seed=row)
        outcomes.append(target.sample(batch, list(range(6)), [0] * 6).wait())
    assert outcomes[0].finite == [False, True, False, True, False, True]
    assert outcomes[0].logprobs[0] is None
    for row in (1, 3, 5):
        assert outcomes[0].tokens[row] == outcomes[1].tokens[row]
        assert outcomes[0].logprobs[row] == outcomes[1].logprobs[row]


def test_a_mask_or_a_ban_hides_no_nan():
    logits = torch.zeros(2, 33)
    logits[0, 5] = torch.nan
    target = sampler(33, 2)
    add(target, 0, SamplingParams())
    add(target, 1, SamplingParams())
    masks = {0: bitmask({1}, 33), 1: bitmask({1}, 33)}
    assert target.sample(logits, [0, 1], [0, 0], masks=masks).wait().finite == [False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_plain_greedy_rows_take_the_first_of_the_likeliest(dtype):
    logits = torch.randn(5, 4097).to(dtype)
    logits[3, [100, 4096]] = 50
    target = sampler(4097, 5)
    for row in range(5):
        add(target, row, SamplingParams())
    samples = target.sample(logits, [4, 0, 1, 2, 3], [0] * 5).wait()
    assert samples.tokens == logits.float().argmax(dim=-1).tolist()
    assert samples.tokens[3] == 100
    assert samples.finite == [True] * 5
    assert samples.logprobs == [None] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_any_dtype_may_have_their_logits_changed(dtype):
    logits = torch.zeros(2, 33).to(dtype)
    target = sampler(33, 2)
    add(target, 0, SamplingParams(logit_bias={7: 5.0}))
    add(target, 1, SamplingParams())
    samples = target.sample(logits, [0, 1], [0, 0]).wait()
    assert (samples.tokens, samples.finite) == ([7, 0], [True, True])


def test_a_reused_row_keeps_nothing():
    pick, logits = random.Random(0), torch.randn(1, 33)
    target = sampler(33, 2)
    for _ in range(40):
        params, _, tokens, seed, count, _ = _random_request(pick, 33)
        add(target, 1, params, seed=seed, **tokens)
        target.record(1, 7)
        target.sample(logits, [1], [count]).wait()
        target.remove(1)
    add(target, 1, SamplingParams(temperature=1.0), seed=5)
    fresh = sampler(33, 2)
    add(fresh, 0, SamplingParams(temperature=1.0), seed=5)
    for count in range(50):
        assert target.sample(logits, [1], [count]).wait() == fresh.sample(logits, [0], [count]).wait()


def test_a_resumed_row_goes_on_as_if_it_had_never_stopped():
    """A preempted branch is added again with what it generated; the stream depends on the count alone."""
    params = SamplingParams(temperature=1.0, repetition_penalty=1.2, frequency_penalty=0.5)
    logits = torch.randn(30, 1, 33)
    whole, tokens = sampler(33), []
    add(whole, 0, params, prompt=[1, 2], seed=9)
    for step in range(30):
        if step == 13:
            whole.remove(0)
            add(whole, 0, params, prompt=[1, 2], generated=tokens, seed=9)
        tokens += whole.sample(logits[step], [0], [step]).wait().tokens
        whole.record(0, tokens[-1])
    steady, others = sampler(33), []
    add(steady, 0, params, prompt=[1, 2], seed=9)
    for step in range(30):
        others += steady.sample(logits[step], [0], [step]).wait().tokens
        steady.record(0, others[-1])
    assert tokens == others


def test_samples_of_one_request_differ():
    target, logits = sampler(4097, 16), torch.zeros(16, 4097)
    for row in range(16):
        add(target, row, SamplingParams(temperature=1.0), seed=mix_seed(0, row))
    assert len(set(target.sample(logits, list(range(16)), [0] * 16).wait().tokens)) > 12


def test_a_row_is_added_once_and_removed_once():
    target = sampler(33)
    add(target, 0, SamplingParams())
    with pytest.raises(AssertionError, match="in use already"):
        add(target, 0, SamplingParams())
    target.remove(0)
    with pytest.raises(AssertionError, match="isn't in use"):
        target.remove(0)
