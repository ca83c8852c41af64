"""Watching long measurements: their progress, and how to make the rows of finished parts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

Progress = Callable[[int, int], None]  # (steps done, steps in all)
Keep = Callable[[Callable[[], Any]], object]  # told how to make what is finished now


@dataclass(frozen=True, slots=True)
class Watch:  # D42: plans are values, one Watch follows progress
    """Callbacks of a measurement."""

    progress: Progress = lambda done, total: None
    keep: Keep = lambda make: None

    def through(self, rows: Callable[[list[Any]], Any]) -> "Watch":
        """Return the callbacks for a part of the measurement; `rows` makes rows of its results."""
        return replace(self, keep=lambda make: self.keep(lambda: rows(make())))


UNWATCHED = Watch()


def part_of(progress: Progress, index: int, count: int) -> Progress:
    """Return the progress function of part `index` of `count` equally long parts."""
    return lambda done, total: progress(index * total + done, count * total)
