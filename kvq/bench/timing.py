"""Samples of a measured time, summed up."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter_ns
from typing import Any, TypeVar

T = TypeVar("T")


class Timings:
    """Times of operations at one scale in microseconds, each the mean of a batch."""

    def __init__(self, scale: str) -> None:
        self._scale = scale
        self._us: dict[tuple[str, str], list[float]] = {}

    def call(
        self, operation: str, work: Callable[..., T], *given: Any, count: int = 1, per: str = "sequence"
    ) -> T:
        """Do the work, which is `count` operations, or one of so many blocks; add its time."""
        start_ns = perf_counter_ns()
        found = work(*given)
        end_ns = perf_counter_ns()
        self._us.setdefault((operation, per), []).append((end_ns - start_ns) / 1000 / count)
        return found

    def rows(self) -> list[dict[str, Any]]:
        """Median and 10th to 90th percentile of each, as rows of `kvq bench` results."""
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
    """Every contender in every repeat, which begins with the next one each time; with the repeat's number."""
    for repeat in range(repeats):
        for i in range(len(contenders)):
            yield repeat, contenders[(i + repeat) % len(contenders)]


def percentile(values: Iterable[float], percent: float) -> float:
    """The value below which `percent` of `values` lie, interpolated."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
