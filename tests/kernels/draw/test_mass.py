"""Promises: sums are exact in any order, and the ends of [0, 1) draw the first and last token with mass."""

import math

import pytest
import torch

from kvq.kernels.draw.reference import MASS_OF_LIKELIEST, MAX_VOCAB, draw, log_probability, masses

_LAST = 1 - 2.0**-53  # the highest number a row can get


@pytest.mark.parametrize("scale", [1, 1 << 43, 1 << 60])
def test_the_ends_draw_tokens_that_have_mass(scale):
    mass = torch.tensor([[0, 1, 0, 2, 1, 0]]) * scale
    sums = mass.cumsum(dim=-1)
    drawn = [draw(sums, sums[:, -1], torch.tensor([u]).double()).item() for u in (0, 0.25, 0.7, 0.75, _LAST)]
    assert drawn == [1, 3, 3, 4, 4]


def test_nothing_is_drawn_behind_the_total():
    sums = torch.tensor([[4, 7, 9, 10]])
    assert draw(sums, sums[:, 1], torch.tensor([_LAST]).double()).item() == 1


def test_the_largest_vocabulary_fits():
    equal = masses(torch.zeros(1, MAX_VOCAB), torch.zeros(1))
    assert equal.sum().item() == MAX_VOCAB * MASS_OF_LIKELIEST


def test_masses_do_not_depend_on_place_or_neighbours():
    """An exponential that treats a vector's tail differently would show here."""
    logits = torch.randn(7, 4099) * 5
    peaks, temperature = logits.amax(dim=-1), torch.rand(7) + 0.1
    together = masses(logits, peaks, temperature)
    for row in range(7):
        for part in (slice(0, 1), slice(3, 20), slice(1, 4099), slice(4090, 4099)):
            piece = logits[row : row + 1, part].clone()
            alone = masses(piece, peaks[row : row + 1], temperature[row : row + 1])
            assert torch.equal(alone[0], together[row, part])


def test_log_probabilities():
    assert log_probability(1.0, 3.0, 2.0 * MASS_OF_LIKELIEST) == pytest.approx(-2 - math.log(2))
    assert log_probability(-math.inf, 3.0, 2.0 * MASS_OF_LIKELIEST) == -math.inf
    assert math.isnan(log_probability(1.0, math.nan, 5.0))
