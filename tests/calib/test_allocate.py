"""The knapsack: exactly the best of all choices, for every budget."""

import itertools
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.calib.search import _Allocation
from kvq.errors import ConfigError


@dataclass(frozen=True)
class Option:
    choice: object
    nbytes: Fraction | int
    kl: float


OPTIONS = st.lists(
    st.tuples(st.integers(1, 40).map(lambda n: 8 * n), st.floats(1e-9, 10.0)), min_size=1, max_size=4
)


def units_of(drawn):
    return [
        [Option(choice=(i, j), nbytes=nbytes, kl=cost) for j, (nbytes, cost) in enumerate(options)]
        for i, options in enumerate(drawn)
    ]


@given(st.lists(OPTIONS, min_size=1, max_size=4), st.integers(0, 2000), st.sampled_from([1, 3, 32]))
@settings(max_examples=200, deadline=None)
def test_the_choice_is_the_best_of_all(drawn, budget, parts):
    """Also where a token takes a fraction of a byte, as block means do."""
    drawn = [[(Fraction(nbytes, parts), cost) for nbytes, cost in options] for options in drawn]
    units = units_of(drawn)
    every = [
        (sum(o.nbytes for o in picked), sum(o.kl for o in picked), [o.choice for o in picked])
        for picked in itertools.product(*units)
    ]
    fitting = [found for found in every if found[0] <= budget]
    allocation = _Allocation(units)
    assert allocation.least_bytes == min(found[0] for found in every)
    assert allocation.most_bytes == max(found[0] for found in every)
    if not fitting:
        with pytest.raises(ConfigError, match="the smallest formats allowed take"):
            allocation.choose(budget)
        return
    best = min(found[1] for found in fitting)
    assert allocation.cost(budget) == pytest.approx(best)
    chosen = [option.choice for option in allocation.choose(budget)]
    nbytes, cost = next(found[:2] for found in every if found[2] == chosen)
    assert nbytes <= budget
    assert cost == pytest.approx(best)
    least = min(found[0] for found in every if found[1] <= best)
    assert allocation.budget_for(best * (1 + 1e-12)) == least


def test_a_limit_that_nothing_meets_is_refused_with_the_best():
    allocation = _Allocation([[Option(choice="a", nbytes=8, kl=0.5)]])
    with pytest.raises(ConfigError, match=r"expected to cost 0\.1 or less; the best costs 0\.5"):
        allocation.budget_for(0.1)


def test_a_large_model_is_solved_in_seconds():
    """126 layers of K and V of 8 heads, with twelve options, half of them less means: Llama 3.1 405B."""
    sizes = [
        8 * (bits * 16 + 128 // group) + mean for bits in (3, 4, 6) for group in (64, 32) for mean in (0, 17)
    ]
    options = [Option(choice=i, nbytes=size, kl=1.0 / size) for i, size in enumerate(sizes)]
    allocation = _Allocation([options] * 252)
    assert allocation.cost(252 * 700) <= allocation.cost(252 * 600)
