"""Percentiles of more values than anybody wants to keep."""

from math import exp, log

_BINS = 400  # of a factor of e: a quarter of a percent each
_LOG = log


class Histogram:
    """Counts of positive numbers by their logarithm; what it tells is right within 0.13%."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.count = 0
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, several times."""
        key = int(_LOG(value) * _BINS // 1) if value > 0 else _LEAST
        self._counts[key] = self._counts.get(key, 0) + times
        self.count += times
        self.total += value * times

    def merge(self, other: "Histogram") -> None:
        """Count what another one counted."""
        for key, times in other._counts.items():
            self._counts[key] = self._counts.get(key, 0) + times
        self.count += other.count
        self.total += other.total

    def percentile(self, rank: float) -> float | None:
        """The smallest value that at least `rank` percent don't exceed; None of none."""
        left = self.count * rank / 100
        for key in sorted(self._counts):
            left -= self._counts[key]
            if left <= 0:
                return 0.0 if key == _LEAST else exp((key + 0.5) / _BINS)
        return None

    def items(self) -> list[tuple[int, int]]:
        """What was counted, for comparing runs."""
        return sorted(self._counts.items())


_LEAST = -(1 << 30)  # the bin of zero


def percentile(values: list[float], rank: float) -> float:
    """The smallest value that at least `rank` percent of them don't exceed; 0.0 for none."""
    ordered = sorted(values)
    return ordered[max(0, -int(-len(ordered) * rank // 100) - 1)] if ordered else 0.0
