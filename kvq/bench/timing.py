"""Timing helpers of benchmarks: percentiles, turns of contenders, and progress of repeated work."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Progress = Callable[[int, int], object]  # (steps done, steps in all)
Keep = Callable[[Callable[[], list[dict[str, Any]]]], object]  # takes a function that makes the rows so far


def unwatched(done: int, total: int) -> None:
    """Ignore progress."""


def unkept(make: Callable[[], object]) -> None:
    """Keep no rows of unfinished work."""


def part_of(progress: Progress, index: int, count: int) -> Progress:
    """Return the progress function of part `index` of `count` equally long parts."""
    return lambda done, total: progress(index * total + done, count * total)


def in_turn(contenders: Sequence[T], repeats: int) -> Iterator[tuple[int, T]]:
    """Yield the number of each repeat with every contender; each repeat begins with the next contender."""
    for repeat in range(repeats):
        for i in range(len(contenders)):
            yield repeat, contenders[(i + repeat) % len(contenders)]


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the median of a figure and its 10th and 90th percentiles as `name`, `name_p10`, `name_p90`."""
    return {
        name: percentile(values, 50),
        f"{name}_p10": percentile(values, 10),
        f"{name}_p90": percentile(values, 90),
    }


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the value below which `percent` of `values` lie, interpolated."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
