"""Promises: the filters keep exactly what they say, and what they keep is drawn in proportion."""

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvq.engine.params import SamplingParams
from tests.engine.sampling.reference import distribution, draws

_CASES = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.7, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.7},
    {"temperature": 1.1, "top_k": 12, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 10**9, "top_p": 0.3},
]


def _logits(vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * 1.5


@pytest.mark.parametrize("case", _CASES, ids=str)
@pytest.mark.parametrize("vocab_size", [33, 40])
def test_tokens_are_drawn_in_proportion(case, vocab_size):
    """A chi-square test against float64; the bound is passed by chance once in 100,000 runs."""
    logits, params = _logits(vocab_size), SamplingParams(**case)
    wanted = distribution(logits.tolist(), params)
    tokens = draws(logits, params, 8000)
    assert set(tokens) <= set(wanted)
    statistic = sum((tokens.count(t) - 8000 * p) ** 2 / (8000 * p) for t, p in wanted.items())
    degrees = max(len(wanted) - 1, 1)
    assert statistic < degrees + 4.3 * (2 * degrees) ** 0.5 + 12


@pytest.mark.parametrize(
    ("case", "kept"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 3, 4}),  # three equal ones compete for two places: the lower ids stay
        ({"top_p": 1e-9}, {1}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 3}),
        ({"top_p": 0.79}, {1, 3, 4}),
        ({"top_k": 2, "top_p": 0.66}, {1}),  # a share of what top_k left: 4 of 6
        ({"min_p": 0.49}, {1, 3, 4, 5}),
        ({"min_p": 0.51}, {1}),
        ({"min_p": 1.0}, {1}),
        ({"min_p": 0.49, "top_p": 0.79}, {1, 3, 4}),
        ({}, {1, 3, 4, 5}),  # what is impossible stays so
    ],
    ids=str,
)
def test_the_kept_set_is_exact(case, kept):
    """Weights 4, 2, 2 and 2 of 10, at tokens 1, 3, 4 and 5."""
    logits = torch.full((33,), -torch.inf)
    logits[[1, 3, 4, 5]] = torch.tensor([4.0, 2.0, 2.0, 2.0]).log()
    assert set(draws(logits, SamplingParams(temperature=1.0, **case), 400)) == kept


@pytest.mark.parametrize(
    ("case", "kept"),
    [
        ({"top_k": 5}, 5),
        ({"top_p": 0.25}, 8),  # 8 of 32 reach it exactly
        ({"top_p": 0.25 + 1e-9}, 9),
        ({"top_p": 1e-300}, 1),
        ({"top_p": 1 - 1e-16}, 32),
        ({"top_k": 16, "top_p": 0.5}, 8),
        ({"min_p": 1.0}, 32),
    ],
    ids=str,
)
def test_equal_tokens_are_kept_by_their_ids(case, kept):
    logits = torch.full((40,), -torch.inf)
    logits[5:37] = 1.25
    assert set(draws(logits, SamplingParams(temperature=0.7, **case), 1000)) == set(range(5, 5 + kept))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("case", _CASES[1:], ids=str)
def test_kept_sets_agree_with_transformers(case, seed):
    logits = _logits(65, seed)[None]
    scores = TemperatureLogitsWarper(case["temperature"])(None, logits)
    if "min_p" in case:
        scores = MinPLogitsWarper(case["min_p"])(None, scores)
    if "top_k" in case:
        scores = TopKLogitsWarper(case["top_k"])(None, scores)
    if "top_p" in case:
        scores = TopPLogitsWarper(case["top_p"])(None, scores)
    theirs = set(scores[0].isfinite().nonzero()[:, 0].tolist())
    assert set(distribution(logits[0].tolist(), SamplingParams(**case))) == theirs
    assert set(draws(logits[0], SamplingParams(**case), 500)) <= theirs


def test_a_tiny_temperature_takes_the_likeliest():
    logits = _logits(4097)
    for temperature in (1e-300, 1e-40, 1e-6):
        assert set(draws(logits, SamplingParams(temperature=temperature), 20)) == {int(logits.argmax())}


def test_a_wide_top_k_draws_like_a_narrow_one_of_the_same_tokens():
    """The path changes above a top_k of 1024; what is drawn doesn't."""
    logits = _logits(4097)
    logits[logits.argsort()[:-1000]] = -torch.inf
    narrow, wide = (draws(logits, SamplingParams(temperature=1.0, top_k=k), 300) for k in (1000, 2000))
    assert narrow == wide
