"""Memory budget allocation: choose one option per unit so that the total cost is the exact minimum.

This is the multiple-choice knapsack problem, solved by dynamic programming over bytes. Unit costs are assumed
to be additive; `kvq tune` then checks this assumption on the whole recipe. Source: Kellerer, Pferschy and
Pisinger 2004, Knapsack Problems, section 11.5.
"""

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from kvq.calib.candidates import Trial
from kvq.errors import ConfigError


class Allocation:  # D27: exact knapsack over single costs
    """Optimal choices of one option per unit, for every budget."""

    def __init__(self, units: Sequence[Sequence[Trial]]) -> None:
        """Solve for all budgets, in O(units x options x bytes / their greatest common divisor).

        There must be at least one unit, each with at least one option.
        """
        self._units = units
        least = [min(option.nbytes for option in options) for options in units]
        above = [[o.nbytes - fewest for o in options] for options, fewest in zip(units, least, strict=True)]
        self.least_bytes = sum(least)  # per token, with the smallest choices
        self._unit_bytes = _common_divisor(list(itertools.chain(*above)))
        self._shifts = [[int(nbytes / self._unit_bytes) for nbytes in one] for one in above]
        best = np.zeros(1)
        self._picked: list[NDArray[np.int16]] = []  # per unit: the option chosen for each budget
        for options, shifts in zip(units, self._shifts, strict=True):
            grown = np.full(len(best) + max(shifts), np.inf)
            picked = np.zeros(len(grown), dtype=np.int16)
            for index, (option, shift) in enumerate(zip(options, shifts, strict=True)):
                total, part = best + option.kl, slice(shift, shift + len(best))
                better = total < grown[part]
                grown[part][better] = total[better]
                picked[part][better] = index
            best = grown
            self._picked.append(picked)
        self._costs = best  # [extra bytes / unit_bytes], for exactly that many bytes
        self.most_bytes = self.least_bytes + (len(best) - 1) * self._unit_bytes  # with the largest

    def cost(self, budget: Fraction | int) -> float:
        """Return the minimum total cost within `budget` bytes per token."""
        return float(self._costs[self._best(budget)])

    def choose(self, budget: Fraction | int) -> list[Trial]:
        """Return one option per unit, with the minimum total cost within `budget` bytes per token.

        Raises:
            ConfigError: even the smallest choices don't fit.
        """
        at = self._best(budget)
        chosen: list[Trial] = []
        for options, shifts, picked in reversed(
            list(zip(self._units, self._shifts, self._picked, strict=True))
        ):
            chosen.append(options[picked[at]])
            at -= shifts[picked[at]]
        return chosen[::-1]

    def budget_for(self, cost: float) -> Fraction:
        """Return the smallest budget in bytes per token for which the minimum total cost is at most `cost`.

        Raises:
            ConfigError: every choice costs more than `cost`.
        """
        enough = np.flatnonzero(self._costs <= cost)
        if not len(enough):
            raise ConfigError(
                f"no choice of formats is expected to cost {cost:g} or less; "
                f"the best costs {self._costs.min():.3g}"
            )
        return self.least_bytes + int(enough[0]) * self._unit_bytes

    def _best(self, budget: Fraction | int) -> int:
        extra = (budget - self.least_bytes) // self._unit_bytes
        if extra < 0:
            raise ConfigError(
                f"the smallest formats allowed take {float(self.least_bytes):g} bytes per token, "
                f"the budget is {float(budget):g}"
            )
        return int(np.argmin(self._costs[: extra + 1]))


def _common_divisor(sizes: Sequence[Fraction | int]) -> Fraction:
    """Return the largest number of which all sizes are multiples, or 1 if all sizes are zero."""
    whole = math.lcm(*(size.denominator for size in sizes))
    return Fraction(math.gcd(*(int(size * whole) for size in sizes)) or whole, whole)
