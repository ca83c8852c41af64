"""What became of every request: columns of numbers, so that a million of them stay small."""

from array import array
from dataclasses import dataclass, field
from enum import IntEnum
from math import nan

from kvq.capacity.fleet.call import Call


class Fate(IntEnum):
    """How a request ended."""

    OPEN = 0  # it has not
    SERVED = 1
    REFUSED = 2  # it can never fit
    FAILED = 3  # it could not go on although nothing else ran, or its engine died
    OVERFLOWED = 4  # sent to somebody else's API
    CANCELLED = 5  # its client left


def _doubles() -> "array[float]":
    return array("d")


def _counts() -> "array[int]":
    return array("I")


@dataclass(slots=True)
class Records:
    """One entry of each column a request, by its number. Times in seconds; NaN for what never happened."""

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

    def close(self, number: int, fate: Fate, now: float) -> None:
        """A request ended."""
        assert self.fate[number] == Fate.OPEN, f"request {number} ended twice"
        self.fate[number] = fate
        self.end_s[number] = now

    def itl_s(self, number: int) -> float:
        """Mean time between a served request's tokens; 0 of a single one."""
        gaps = self.output_tokens[number] - 1
        return (self.end_s[number] - self.first_s[number]) / gaps if gaps else 0.0
