"""Tails are those of exact arithmetic, far out too."""

from fractions import Fraction
from math import comb

import pytest

from kvq.watermark.detection import binomial_tail


def exact(successes: int, trials: int, share: Fraction) -> float:
    return float(
        sum(
            comb(trials, k) * share**k * (1 - share) ** (trials - k)
            for k in range(max(0, successes), trials + 1)
        )
    )


@pytest.mark.parametrize("share", [Fraction(1, 4), Fraction(1, 2), Fraction(9, 10)])
@pytest.mark.parametrize("trials", [0, 1, 7, 198])
def test_a_tail_is_the_sum_of_its_terms(trials, share):
    for successes in range(trials + 2):
        assert binomial_tail(successes, trials, float(share)) == pytest.approx(
            exact(successes, trials, share), rel=1e-9, abs=0
        )


def test_a_tail_far_out_is_no_normal_one():
    """63 of 63 tokens green: 4**-63, of which a normal tail says 1e-42."""
    assert binomial_tail(63, 63, 0.25) == pytest.approx(4.0**-63, rel=1e-9)


def test_long_texts_have_tails_too():
    middle = binomial_tail(500_000, 1_000_000, 0.5)
    assert middle == pytest.approx(0.5 + comb(1000, 500) / 2**1001 * (1000 / 1e6) ** 0.5, rel=1e-4)
    assert 0 < binomial_tail(504_000, 1_000_000, 0.5) < 1e-14
