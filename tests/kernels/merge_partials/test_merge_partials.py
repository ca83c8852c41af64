"""merge_partials: attention over any split of the keys is attention over all of them."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.backends import every_backend

merge_partials: Any = None  # the implementation under test


backend = every_backend("merge_partials", globals())


EMPTY = -math.inf


def scores_and_values(keys: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """fp64 scores [5 tokens, 3 heads, keys] with a wide spread, and values [keys, 3 heads, 7]."""
    source = torch.Generator().manual_seed(seed)
    scores = torch.randn(5, 3, keys, generator=source, dtype=torch.float64) * 12
    return scores, torch.randn(keys, 3, 7, generator=source, dtype=torch.float64)


def softmax_part(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over those keys alone, in fp64; (0, -inf) over none."""
    if scores.shape[-1] == 0:
        return torch.zeros(5, 3, 7, dtype=torch.float64), torch.full((5, 3), EMPTY, dtype=torch.float64)
    weights = torch.softmax(scores, dim=-1)
    return torch.einsum("thk,khd->thd", weights, values), torch.logsumexp(scores, dim=-1)


def merge(parts: list[tuple[Tensor, Tensor]], sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Merge fp64 parts as the fp32 that kernels hand over."""
    outs, lses = (torch.stack(x).float() for x in zip(*parts, strict=True))
    return merge_partials(outs, lses, sinks)


@pytest.mark.parametrize(
    "bounds", [[0, 63], [0, 1, 63], [0, 20, 20, 41, 63], [0, 0, 63, 63], list(range(64))]
)
def test_any_split_of_the_keys_merges_to_one_softmax(bounds: list[int]) -> None:
    scores, values = scores_and_values(63)
    pairs = list(itertools.pairwise(bounds))
    out, lse = merge([softmax_part(scores[..., a:b], values[a:b]) for a, b in pairs])
    expected_out, expected_lse = softmax_part(scores, values)
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(out, expected_out.float(), rtol=0, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse.float(), rtol=1e-6, atol=1e-6)


def test_merging_is_the_same_in_any_order_and_in_two_steps() -> None:
    scores, values = scores_and_values(40)
    parts = [softmax_part(scores[..., a : a + 10], values[a : a + 10]) for a in range(0, 40, 10)]
    out, lse = merge(parts)
    turned, turned_lse = merge(parts[::-1])
    stepwise, stepwise_lse = merge([merge(parts[:3]), parts[3]])
    for a, b in ((out, turned), (lse, turned_lse), (out, stepwise), (lse, stepwise_lse)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_two_empty_parts_merge_to_an_empty_part() -> None:
    none = (torch.zeros(5, 3, 7), torch.full((5, 3), EMPTY))
    out, lse = merge([none, none])
    assert torch.equal(out, torch.zeros(5, 3, 7))
    assert torch.equal(lse, torch.full((5, 3), EMPTY))


def test_an_empty_part_changes_nothing_even_if_its_output_is_nan() -> None:
    part = softmax_part(*scores_and_values(9))
    alone = merge([part])
    for junk in (0.0, math.nan, math.inf):
        out, lse = merge([(torch.full((5, 3, 7), junk), torch.full((5, 3), EMPTY)), part])
        assert torch.equal(out, alone[0])
        assert torch.equal(lse, alone[1])


@pytest.mark.parametrize("bounds", [[0, 63], [0, 10, 63], [0, 5, 30, 30, 63]])
def test_sinks_enter_once_however_many_parts_there_are(bounds: list[int]) -> None:
    scores, values = scores_and_values(63)
    sinks = torch.tensor([3.0, 45.0, -2.0])
    pairs = list(itertools.pairwise(bounds))
    out, lse = merge([softmax_part(scores[..., a:b], values[a:b]) for a, b in pairs], sinks)
    as_key = torch.cat((scores, sinks.double()[None, :, None].expand(5, 3, 1)), dim=-1)
    with_key = softmax_part(as_key, torch.cat((values, torch.zeros(1, 3, 7, dtype=torch.float64))))
    torch.testing.assert_close(out, with_key[0].float(), rtol=0, atol=1e-5)
    torch.testing.assert_close(lse, with_key[1].float(), rtol=1e-6, atol=1e-6)


def test_a_sink_over_no_keys_at_all_gives_zero_and_its_own_logit() -> None:
    out, lse = merge([(torch.zeros(5, 3, 7), torch.full((5, 3), EMPTY))] * 2, torch.tensor([3.0, 45.0, -2.0]))
    assert torch.equal(out, torch.zeros(5, 3, 7))
    assert torch.equal(lse, torch.tensor([3.0, 45.0, -2.0]).expand(5, 3))


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_scores_far_from_zero_neither_overflow_nor_vanish(shift: float) -> None:
    scores, values = scores_and_values(12)
    parts = [softmax_part(scores[..., a:b] + shift, values[a:b]) for a, b in ((0, 5), (5, 12))]
    out, lse = merge(parts)
    expected, expected_lse = softmax_part(scores, values)
    torch.testing.assert_close(out, expected.float(), rtol=0, atol=2e-3)  # fp32 lse near 1e4 is 1e-3 apart
    torch.testing.assert_close(lse, (expected_lse + shift).float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_a_number_is_not_swallowed(bad: float) -> None:
    part = softmax_part(*scores_and_values(9))
    wrong = part[1].clone()
    wrong[2, 1] = bad
    out, lse = merge([part, (part[0], wrong)])
    assert not torch.isfinite(out[2, 1]).any()
    assert not torch.isfinite(lse[2, 1])
    others = torch.ones(5, 3, dtype=torch.bool)
    others[2, 1] = False
    assert torch.isfinite(out[others]).all()
