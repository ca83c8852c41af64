"""Callbacks of long measurements: progress, and the results of finished parts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

Progress = Callable[[int, int], None]  # (steps done, steps in all)
Keep = Callable[[Callable[[], Any]], object]  # receives a function that returns the finished results


@dataclass(frozen=True, slots=True)
class Watch:  # D42: plans are values, and one Watch follows progress
    """Callbacks of a measurement, for progress, partial results, and what the user should know meanwhile."""

    progress: Progress = lambda done, total: None
    keep: Keep = lambda make: None
    say: Callable[[str], object] = lambda text: None

    def through(self, rows: Callable[[list[Any]], Any]) -> "Watch":
        """Return the same callbacks, with `rows` applied to the results before they are kept."""
        return replace(self, keep=lambda make: self.keep(lambda: rows(make())))


UNWATCHED = Watch()


def part_of(progress: Progress, index: int, count: int) -> Progress:
    """Return the progress function of part `index` of `count` equally long parts."""
    return lambda done, total: progress(index * total + done, count * total)
