"""The digest of everything that happened, by which two runs are compared."""

from array import array
from collections.abc import Iterable
from hashlib import sha256
from itertools import chain

from kvq.scheduler import StepPlan
from tests.capacity.harness.records import Outcome

_STEP, _END = 1, 2
_OUTCOMES = {outcome: i for i, outcome in enumerate(Outcome)}


class Trace:
    """Takes events in; what they were is forgotten but for the digest."""

    def __init__(self) -> None:
        self._sha = sha256()

    def step(self, now: float, plan: StepPlan | None, keys: list[list[int]]) -> None:
        """A step, and what came of it."""
        if plan is None:
            self._take((_STEP, _nanoseconds(now)))
            return
        self._take((_STEP, _nanoseconds(now), len(keys), len(plan.orders), len(plan.table_changes)))
        self._take(plan.counts)
        self._take(plan.ends)
        self._take(chain.from_iterable(keys))

    def end(self, now: float, number: int, outcome: Outcome) -> None:
        """A request ended."""
        self._take((_END, _nanoseconds(now), number, _OUTCOMES[outcome]))

    def digest(self) -> str:
        """16 hexadecimal digits."""
        return self._sha.hexdigest()[:16]

    def _take(self, numbers: Iterable[int]) -> None:
        self._sha.update(array("q", numbers).tobytes())


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
