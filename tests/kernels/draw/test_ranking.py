"""Promises: likelihood first, then token id, whatever the width; odd vocabularies, infinities, -0.0."""

import pytest
import torch

from kvq.kernels.draw import reference
from kvq.kernels.draw.reference import Settings, draw_ranked, likeliest, ranked


@pytest.mark.parametrize("vocab_size", [1, 33, 4097])
@pytest.mark.parametrize("levels", [3, 10**6])
def test_ranked_is_a_stable_sort_at_every_width(vocab_size, levels):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randint(-levels, levels, (5, vocab_size), generator=generator).float() / 7
    logits[0, ::3] = -torch.inf
    values, tokens = torch.sort(logits, dim=-1, descending=True, stable=True)
    for width in {1, min(2, vocab_size), vocab_size // 33 or 1, vocab_size // 2 or 1, vocab_size}:
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


@pytest.mark.parametrize("vocab_size", [64, 1003, 20_001])
def test_the_few_likeliest_are_found_wherever_they_lie(vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    few = vocab_size // 32
    rows = [
        torch.arange(vocab_size).float(),  # all in the last lanes
        -torch.arange(vocab_size).float(),
        torch.full((vocab_size,), -torch.inf).index_fill_(0, torch.tensor([3, vocab_size - 1]), -2.5),
        torch.zeros(vocab_size),
        torch.randn(vocab_size, generator=generator),
    ]
    logits = torch.stack(rows)
    _, tokens = torch.sort(logits, dim=-1, descending=True, stable=True)
    for width in {1, 2, few}:
        assert torch.equal(ranked(logits, width)[1], tokens[:, :width])
        assert ranked(logits[:0], width)[1].shape == (0, width)
    logits[1, ::7] = torch.nan
    assert torch.equal(ranked(logits, few)[1][[0, 2, 3, 4]], tokens[[0, 2, 3, 4], :few])


@pytest.mark.parametrize("scale", [0.0, 0.3, 2.0, 5.0])
@pytest.mark.parametrize("vocab_size", [97, 10_007, 150_001])
def test_a_nucleus_among_all_tokens_is_the_same_without_sorting_all(vocab_size, scale, monkeypatch):
    """A top_k of the whole vocabulary sorts all tokens."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = scale * torch.randn(3, vocab_size, generator=generator)
    logits[1] = (8 * logits[1]).round() / 8
    logits[2, ::2] = -torch.inf
    peaks, _ = likeliest(logits)
    widths, sort = [], reference._lowest
    monkeypatch.setattr(reference, "_lowest", lambda keys, width: widths.append(width) or sort(keys, width))
    for top_p in (1e-9, 0.5, 0.9, 0.999, 1 - 1e-12):
        given = {
            "uniform": torch.rand(3, generator=generator, dtype=torch.float64),
            "temperature": torch.tensor([0.3, 1.0, 1.5]),
            "min_p": torch.tensor([0.0, 0.0, 0.02], dtype=torch.float64),
            "top_p": torch.full((3,), top_p, dtype=torch.float64),
        }
        every = torch.full((3,), float(vocab_size), dtype=torch.float64)
        wanted = draw_ranked(logits, peaks, Settings(**given, top_k=every), vocab_size)
        widths.clear()
        assert torch.equal(draw_ranked(logits, peaks, Settings(**given, top_k=None), vocab_size), wanted)
        if vocab_size > 10_000 and scale == 5 and top_p <= 0.5:
            assert set(widths) == {256}
