"""Timing helpers of benchmarks: percentiles, turns of contenders, and progress of repeated work."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter_ns
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


class Timings:
    """Times of operations at one scale in microseconds, each the mean of a batch."""

    def __init__(self, scale: str) -> None:
        self._scale = scale
        self._us: dict[tuple[str, str], list[float]] = {}

    def call(
        self, operation: str, work: Callable[..., T], *given: Any, count: int = 1, per: str = "sequence"
    ) -> T:
        """Do the work, which is `count` operations, or one on `count` blocks; add its time."""
        start_ns = perf_counter_ns()
        found = work(*given)
        end_ns = perf_counter_ns()
        self._us.setdefault((operation, per), []).append((end_ns - start_ns) / 1000 / count)
        return found

    def rows(self) -> list[dict[str, Any]]:
        """Return median and 10th to 90th percentile of each operation, as rows of `kvq bench` results."""
        return [
            {
                "operation": operation,
                "scale": self._scale,
                "us_median": round(percentile(us, 50), 4),
                "us_p10": round(percentile(us, 10), 4),
                "us_p90": round(percentile(us, 90), 4),
                "samples": len(us),
                "per": per,
            }
            for (operation, per), us in self._us.items()
        ]


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
