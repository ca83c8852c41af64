"""Promises: likelihood first, then token id, whatever the width; odd vocabularies, infinities, -0.0."""

import pytest
import torch

from kvq.kernels.draw.reference import likeliest, ranked


@pytest.mark.parametrize("vocab_size", [1, 33, 4097])
@pytest.mark.parametrize("levels", [3, 10**6])
def test_ranked_is_a_stable_sort_at_every_width(vocab_size, levels):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randint(-levels, levels, (5, vocab_size), generator=generator).float() / 7
    logits[0, ::3] = -torch.inf
    values, tokens = torch.sort(logits, dim=-1, descending=True, stable=True)
    for width in {1, min(2, vocab_size), vocab_size // 2 or 1, vocab_size}:
        got_values, got_tokens = ranked(logits, width)
        assert torch.equal(got_values, values[:, :width])
        assert torch.equal(got_tokens, tokens[:, :width])


def test_both_zeros_are_equal():
    logits = torch.tensor([[-0.0, 0.0, -0.0, 1e-45, -1e-45]])
    assert ranked(logits, 5)[1].tolist() == [[3, 0, 1, 2, 4]]


def test_likeliest_is_the_first_of_equals_and_passes_nan_on():
    logits = torch.tensor([[1.0, 3, 3], [1, torch.nan, 5], [-torch.inf] * 3])
    values, tokens = likeliest(logits)
    assert tokens[0] == 1
    assert values[0] == 3
    assert values[1].isnan()
    assert values[2] == -torch.inf
