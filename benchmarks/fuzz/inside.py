"""The fuzzer's doors that need no server, in a process of their own: one after the other, for a quarter of
a second each. What they found, and what they take of memory, goes to standard output as JSON at the end.
"""

import argparse
import importlib
import json
import os
import random
import signal
from pathlib import Path
from time import monotonic

from benchmarks.fuzz.door import Tally, seeds_of

DOORS = ("results", "options", "streams", "folders", "gguf", "templates")
_SLICE_S = 0.25
_LOOK_S = 2.0


def run(doors: list[str], seconds: float, first: int, cases: int) -> dict[str, object]:
    """Cases for so long, or that many of each."""
    tallies = {door: Tally(door) for door in doors}
    modules = {door: importlib.import_module(f"benchmarks.fuzz.{door}") for door in doors}
    numbers = {door: seeds_of(door, first) for door in doors}
    memory: list[int] = []
    began = looked = monotonic()
    is_told_to_end: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: is_told_to_end.append(number))
    while not is_told_to_end and monotonic() - began < seconds:
        if all(tally.num_cases >= cases for tally in tallies.values()):
            break
        for door in doors:
            end = monotonic() + _SLICE_S
            while monotonic() < end and tallies[door].num_cases < cases:
                tallies[door].run(modules[door].case, next(numbers[door]))
        if monotonic() - looked > _LOOK_S or not memory:
            looked = monotonic()
            memory.append(_resident_bytes())
    shown = {door: vars(tally) for door, tally in tallies.items()}
    return {"doors": shown, "memory": memory}


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Run, and tell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--doors", default=",".join(DOORS))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--cases", type=int, default=1 << 40, help="of each door, after which it has no more")
    parser.add_argument("--first", type=int, default=random.Random().randrange(1 << 40))
    given = parser.parse_args()
    print(json.dumps(run(given.doors.split(","), given.seconds, given.first, given.cases)))


if __name__ == "__main__":
    main()
