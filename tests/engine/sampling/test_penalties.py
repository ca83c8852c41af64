"""Promises: penalties and biases by their formulas, for greedy rows too, and only on their own rows."""

import random

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from kvq.engine.params import SamplingParams, check_params
from kvq.errors import RequestError
from tests.engine.sampling.reference import add, adjusted, sampler

_VOCAB = 33


def _scores(target, logits, rows, counts=None):
    return target._scores(logits, rows, counts or [9] * len(rows), {})


def test_repetition_agrees_with_transformers():
    logits, prompt = torch.randn(1, _VOCAB), [3, 3, 7, 30]
    target = sampler(_VOCAB)
    add(target, 0, SamplingParams(repetition_penalty=1.3), prompt=prompt, generated=[7, 8])
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([[*prompt, 7, 8]]), logits)
    torch.testing.assert_close(_scores(target, logits, [0]), theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("seed", range(4))
def test_random_rows_agree_with_the_formulas(seed):
    pick, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    target, rows = sampler(_VOCAB, 8), {}
    for row in range(8):
        params = SamplingParams(
            repetition_penalty=pick.choice([1.0, 0.7, 1.5]),
            presence_penalty=pick.choice([0.0, 0.5, -1]),
            frequency_penalty=pick.choice([0.0, 0.3]),
            logit_bias=pick.choice([None, {0: 5.0, 32: -100}]),
        )
        prompt, generated = ([pick.randrange(_VOCAB) for _ in range(10)] for _ in "ab")
        add(target, row, params, prompt=prompt, generated=generated[:4])
        for token in generated[4:]:
            target.record(row, token)
        rows[row] = (params, prompt, generated)
    order = pick.sample(range(8), k=6)
    logits = torch.randn(6, _VOCAB, generator=generator)
    before = logits.clone()
    wanted = torch.tensor([adjusted(x, *rows[row]) for x, row in zip(logits, order, strict=True)])
    torch.testing.assert_close(_scores(target, logits, order), wanted, rtol=1e-5, atol=1e-6)
    chosen = target.sample(logits, order, [10] * 6).wait().tokens
    assert chosen == wanted.argmax(dim=-1).tolist()
    assert torch.equal(logits, before), "the caller's logits changed"


def test_presence_and_frequency_ignore_the_prompt():
    target, logits = sampler(_VOCAB), torch.randn(1, _VOCAB)
    add(target, 0, SamplingParams(presence_penalty=2, frequency_penalty=1), prompt=range(_VOCAB))
    assert torch.equal(_scores(target, logits, [0]), logits)


def test_impossible_tokens_stay_impossible():
    logits = torch.full((1, _VOCAB), -torch.inf)
    logits[0, 5] = 1.0
    target = sampler(_VOCAB)
    params = SamplingParams(
        repetition_penalty=0.5, presence_penalty=-9, frequency_penalty=-9, logit_bias={4: 100}
    )
    add(target, 0, params, prompt=range(_VOCAB), generated=range(_VOCAB))
    samples = target.sample(logits, [0], [33]).wait()
    assert (samples.tokens, samples.finite) == ([5], [True])


def test_stops_are_forbidden_until_min_tokens():
    logits = torch.zeros(2, _VOCAB)
    logits[:, 7], logits[:, 8], logits[:, 9] = 9.0, 8.0, 7.0
    target = sampler(_VOCAB, 2)
    params = SamplingParams(min_tokens=3, logit_bias={8: 50.0})
    add(target, 0, params, stop_ids=[7, 8, 8, 999])
    add(target, 1, SamplingParams(), stop_ids=[7])
    assert [target.sample(logits, [0, 1], [n, n]).wait().tokens for n in (0, 2, 3)] == [
        [9, 7],
        [9, 7],
        [8, 7],
    ]


@pytest.mark.parametrize("options", [{"logit_bias": {33: 1.0}}, {"stop_token_ids": [2, 33]}], ids=str)
def test_tokens_beyond_the_vocabulary_are_refused_by_name(options):
    params = SamplingParams(**options)
    with pytest.raises(RequestError, match=f"{next(iter(options))}.*0 to 32.*got 33;"):
        check_params(params, _VOCAB)
    target = sampler(_VOCAB)
    with pytest.raises(RequestError):
        add(target, 0, params)
    add(target, 0, SamplingParams())  # nothing was begun
