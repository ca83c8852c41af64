"""Doors of the fuzzer, shared parts: cases, each from a number of its own, and their results.

A door that needs no server is a module with `case(odds) -> str | None`: what is wrong, and how to see it
again. `seeds.json` keeps the numbers of cases that found something; they come first in every run.
"""

import json
import random
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from time import monotonic

from kvq.errors import KVQError

_SEEDS = Path(__file__).resolve().parent / "seeds.json"
_SHOWN = 1200  # characters of a finding
Case = Callable[[random.Random], str | None]  # D338: one fuzzer; a case is a number and a door


def kept_seeds(door: str) -> list[int]:
    """Numbers of cases that once found something."""
    seeds: list[int] = json.loads(_SEEDS.read_text(encoding="utf8")).get(door, [])
    return seeds


def seeds_of(door: str, first: int, step: int = 1) -> Iterator[int]:
    """The kept ones, then all from `first` on, `step` apart."""
    yield from kept_seeds(door)
    yield from count(first, step)


@dataclass
class Tally:
    """Results of one door's cases."""

    door: str
    num_cases: int = 0
    slowest_s: float = 0.0
    findings: list[str] = field(default_factory=list)

    def run(self, case: Case, number: int) -> None:
        """One case."""
        began = monotonic()
        try:
            found = case(random.Random(f"{self.door}/{number}"))
        except KVQError as error:
            found = f"{type(error).__name__} came through: {error}"
        except Exception:  # noqa: BLE001 - this is what is looked for
            found = traceback.format_exc(limit=-6)
        self.num_cases += 1
        self.slowest_s = max(self.slowest_s, monotonic() - began)
        if found is not None:
            self.find(number, found)

    def find(self, number: int, what: str) -> None:
        """Write a finding down."""
        self.findings.append(f"{self.door} {number}: {what:.{_SHOWN}}")
