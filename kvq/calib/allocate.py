"""Spending a memory budget: one option per unit, least total cost, exactly.

The multiple-choice knapsack problem, solved by dynamic programming over bytes; costs of units are taken
to add up, which `kvq tune` then verifies on the whole recipe. Source: Kellerer, Pferschy and Pisinger
2004, Knapsack Problems, section 11.5.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvq.errors import ConfigError

Choice = TypeVar("Choice")


@dataclass(frozen=True, kw_only=True, slots=True)
class Option(Generic[Choice]):
    """One way to store a unit."""

    choice: Choice
    nbytes: int  # per token
    cost: float  # in nats per token, what choosing it adds


class Allocation(Generic[Choice]):
    """The best choices for every budget at once."""

    def __init__(self, units: Sequence[Sequence[Option[Choice]]]) -> None:
        """Solve for all budgets, O(units x options x bytes / their greatest common divisor).

        Raises:
            ConfigError: no units, or one without options.
        """
        if not units or not all(units):
            raise ConfigError("every layer's K and V needs at least one format to choose from")
        self._units = units
        self._least = [min(option.nbytes for option in options) for options in units]
        above = [o.nbytes - least for options, least in zip(units, self._least, strict=True) for o in options]
        self._unit_bytes = math.gcd(*above) or 1
        size = (
            1
            + sum(
                max(o.nbytes for o in options) - least
                for options, least in zip(units, self._least, strict=True)
            )
            // self._unit_bytes
        )
        best = np.zeros(1)
        self._picked: list[NDArray[np.int32]] = []  # per unit: the option that each budget takes
        for options, least in zip(units, self._least, strict=True):
            grown = np.full(min(size, len(best) + self._span(options, least)), np.inf)
            picked = np.zeros(len(grown), dtype=np.int32)
            for index, option in enumerate(options):
                shift = (option.nbytes - least) // self._unit_bytes
                room = min(len(best), len(grown) - shift)
                total = best[:room] + option.cost
                better = total < grown[shift : shift + room]
                grown[shift : shift + room][better] = total[better]
                picked[shift : shift + room][better] = index
            best = grown
            self._picked.append(picked)
        self._costs = best  # [extra bytes / unit_bytes], exactly that many bytes

    def _span(self, options: Sequence[Option[Choice]], least: int) -> int:
        return (max(o.nbytes for o in options) - least) // self._unit_bytes

    @property
    def least_bytes(self) -> int:
        """Bytes per token of the smallest choice."""
        return sum(self._least)

    @property
    def most_bytes(self) -> int:
        """Bytes per token of the largest choice."""
        return self.least_bytes + (len(self._costs) - 1) * self._unit_bytes

    def cost(self, budget: int) -> float:
        """The least total cost within `budget` bytes per token."""
        return float(self._costs[self._best(budget)])

    def choose(self, budget: int) -> list[Choice]:
        """The choices of least total cost within `budget` bytes per token, one per unit.

        Raises:
            ConfigError: not even the smallest choices fit.
        """
        at = self._best(budget)
        chosen: list[Choice] = []
        for options, least, picked in zip(
            reversed(self._units), reversed(self._least), reversed(self._picked), strict=True
        ):
            option = options[picked[at]]
            chosen.append(option.choice)
            at -= (option.nbytes - least) // self._unit_bytes
        return chosen[::-1]

    def budget_for(self, cost: float) -> int:
        """The fewest bytes per token whose least total cost is at most `cost`.

        Raises:
            ConfigError: no choice costs so little.
        """
        enough = np.flatnonzero(self._costs <= cost)
        if not len(enough):
            raise ConfigError(
                f"no choice of formats is expected to cost {cost:g} or less; "
                f"the best costs {self._costs.min():.3g}"
            )
        return self.least_bytes + int(enough[0]) * self._unit_bytes

    def _best(self, budget: int) -> int:
        extra = (budget - self.least_bytes) // self._unit_bytes
        if extra < 0:
            raise ConfigError(
                f"the smallest formats allowed take {self.least_bytes} bytes per token, "
                f"the budget is {budget}"
            )
        return int(np.argmin(self._costs[: extra + 1]))
