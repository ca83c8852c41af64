"""Samples of a measured time, summed up."""

import statistics
from collections.abc import Iterable
from time import perf_counter_ns


class Samples:
    """Times of one operation in microseconds, each the mean of a batch."""

    def __init__(self) -> None:
        self._us: list[float] = []

    def add(self, start_ns: int, count: int) -> None:
        """Add the time since `start_ns` (of `perf_counter_ns`) over `count` operations."""
        self._us.append((perf_counter_ns() - start_ns) / 1000 / count)

    def row(self, operation: str, scale: str) -> dict[str, object]:
        """Median and 10th to 90th percentile, as a row of `kvq bench` results."""
        p10, p90 = percentile(self._us, 10), percentile(self._us, 90)
        return {
            "operation": operation,
            "scale": scale,
            "us_median": round(statistics.median(self._us), 4),
            "us_p10": round(p10, 4),
            "us_p90": round(p90, 4),
            "samples": len(self._us),
        }


def percentile(values: Iterable[float], percent: float) -> float:
    """The value below which `percent` of `values` lie, interpolated."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
