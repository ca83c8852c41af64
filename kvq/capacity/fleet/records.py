"""Request records as columns of numbers and histograms, so that a million requests stay small."""

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from math import exp, isnan, log, nan

from kvq.capacity.fleet.arrivals import Call

_BINS = 400  # of a factor of e: a quarter of a percent each


class Histogram:
    """Counts of positive numbers by their logarithm. Percentiles are exact to 0.13%."""

    def __init__(self) -> None:
        self._counts = Counter[int]()
        self.count = 0
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, several times."""
        key = int(log(value) * _BINS // 1) if value > 0 else _LEAST
        self._counts[key] += times
        self.count += times
        self.total += value * times

    def merge(self, other: "Histogram") -> None:
        """Add the counts of another histogram."""
        self._counts.update(other._counts)
        self.count += other.count
        self.total += other.total

    def percentile(self, rank: float) -> float | None:
        """Return the smallest value that at least `rank` percent don't exceed; None without values."""
        left = self.count * rank / 100
        for key in sorted(self._counts):
            left -= self._counts[key]
            if left <= 0:
                return 0.0 if key == _LEAST else exp((key + 0.5) / _BINS)
        return None

    def items(self) -> list[tuple[int, int]]:
        """Return all counts, for comparing runs."""
        return sorted(self._counts.items())


_LEAST = -(1 << 30)  # the bin of zero


def percentile(values: list[float], rank: float) -> float:
    """Return the smallest value that at least `rank` percent don't exceed; 0.0 without values."""
    ordered = sorted(values)
    return ordered[max(0, -int(-len(ordered) * rank // 100) - 1)] if ordered else 0.0


class Fate(IntEnum):
    """End of a request."""

    OPEN = 0  # it has not
    SERVED = 1
    REFUSED = 2  # it can never fit
    FAILED = 3  # it could not go on although nothing else ran, or its engine died
    OVERFLOWED = 4  # sent to an external API
    CANCELLED = 5  # its client left


_doubles: "Callable[[], array[float]]" = partial(array, "d")
_counts: "Callable[[], array[int]]" = partial(array, "I")


@dataclass(slots=True)
class Records:
    """Columns with one entry per request, by its number. Times in seconds; NaN for what never happened."""

    arrival_s: "array[float]" = field(default_factory=_doubles)
    admitted_s: "array[float]" = field(default_factory=_doubles)  # when it got blocks first
    first_s: "array[float]" = field(default_factory=_doubles)  # when its first token was there
    end_s: "array[float]" = field(default_factory=_doubles)
    prompt_tokens: "array[int]" = field(default_factory=_counts)
    output_tokens: "array[int]" = field(default_factory=_counts)
    cached_tokens: "array[int]" = field(default_factory=_counts)  # of its prompt
    preemptions: "array[int]" = field(default_factory=_counts)
    fate: "array[int]" = field(default_factory=_counts)
    replica: "array[int]" = field(default_factory=_counts)  # that served it, or began to
    handovers: Histogram = field(default_factory=Histogram)  # between tokens of two replicas
    num_cut: int = 0  # requests that were longer than the context

    def __len__(self) -> int:
        return len(self.arrival_s)

    def open(self, call: Call) -> None:
        """Add a row, of the next number."""
        self.num_cut += call.is_cut
        self.arrival_s.append(call.arrival_s)
        for times in (self.admitted_s, self.first_s, self.end_s):
            times.append(nan)
        self.prompt_tokens.append(len(call.prompt))
        self.output_tokens.append(call.output_tokens)
        for counts in (self.cached_tokens, self.preemptions, self.fate, self.replica):
            counts.append(0)

    def begin(self, number: int, now: float) -> None:
        """Record a replica's first token of a request; the second, if another computed the prompt."""
        if isnan(self.first_s[number]):
            self.first_s[number] = now
        else:
            self.handovers.add(now - self.first_s[number])

    def close(self, number: int, fate: Fate, now: float) -> None:
        """Record the end of a request."""
        assert self.fate[number] == Fate.OPEN, f"request {number} ended twice"
        self.fate[number] = fate
        self.end_s[number] = now

    def itl_s(self, number: int) -> float:
        """Return the mean time between a served request's tokens; 0 for a single token."""
        gaps = self.output_tokens[number] - 1
        return (self.end_s[number] - self.first_s[number]) / gaps if gaps else 0.0
