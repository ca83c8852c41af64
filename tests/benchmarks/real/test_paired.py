"""Differences of paired outcomes are those that hands compute."""

import pytest

from benchmarks.real.paired import difference


def outcomes(both, gained, lost, neither):
    return "1" * (both + gained) + "0" * (
        lost + neither
    ), "1" * both + "0" * gained + "1" * lost + "0" * neither


def test_the_interval_is_the_one_computed_by_hand():
    found = difference(*outcomes(60, 12, 4, 24))
    # (12.5 - 4.5) / 102 = 0.078431; sqrt(17 - 8**2 / 102) / 102 = 0.039670; 1.959964 of them on each side
    assert found.difference == pytest.approx(0.08)
    assert found.interval == pytest.approx((0.000680, 0.156182), abs=2e-6)
    assert (found.gained, found.lost) == (12, 4)
    # 2 (1 + 16 + 120 + 560 + 1820) / 2**16
    assert found.p == pytest.approx(0.0768127)


def test_equal_outcomes_leave_a_doubt():
    found = difference(*outcomes(10, 0, 0, 40))
    assert found.difference == 0
    assert found.interval[0] == -found.interval[1]
    assert 0.03 < found.interval[1] < 0.06
    assert found.p == 1


def test_sides_exchanged_give_the_negative():
    one, other = outcomes(5, 7, 2, 6)
    there, back = difference(one, other), difference(other, one)
    assert there.difference == -back.difference
    assert there.interval == pytest.approx((-back.interval[1], -back.interval[0]))
    assert there.p == back.p


def test_outcomes_of_different_problems_are_refused():
    with pytest.raises(ValueError, match="zip"):
        difference("101", "10")
