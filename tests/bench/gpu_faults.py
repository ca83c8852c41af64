"""Parts that fail in every way, and the same runner and worker without torch: for test_gpu.py.

As a module it is the worker, or, given `measure FOLDER`, the whole run.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import worker
from benchmarks.gpu.case import Case, Rows, Target
from benchmarks.gpu.parts import Part
from benchmarks.gpu.record import Record

HERE = "tests.bench.gpu_faults"
ROW = {"figure": 1.5}
_STICKY = "KVQ_TEST_STICKY"  # in the environment of one process


def fails(what: str) -> Rows:
    """What a measurement that raises does."""
    raise RuntimeError(what)


def dies() -> Rows:
    """What a process out of memory, or in a driver that crashes, does."""
    os.kill(os.getpid(), signal.SIGKILL)
    return []


def hangs() -> Rows:
    """What a kernel that never ends does to its process."""
    time.sleep(3600)
    return []


def every_fault(target: Target) -> Iterator[Case]:
    """Cases that fail among cases that don't."""
    yield Case(name="first", run=lambda: [ROW])
    good, bad = (
        Case(name="both: good", run=lambda: [ROW, ROW]),
        Case(name="both: bad", run=lambda: fails("b")),
    )
    yield Case(name="both", run=lambda: fails("a"), pieces=(good, bad))
    yield Case(name="not a number", run=lambda: [{"figure": float("nan")}])
    yield Case(name="dies", run=dies, pieces=(Case(name="dies: piece", run=lambda: [ROW]),))
    yield Case(name="hangs", run=hangs, limit_s=0.5)
    yield Case(name="poisons", run=poisons)
    yield Case(name="last", run=last)


def late(target: Target) -> Iterator[Case]:
    """More than there is time for."""
    yield Case(name="first", run=lambda: [ROW])
    yield Case(name="hangs", run=hangs)
    yield Case(name="never", run=lambda: [ROW])


def gated(target: Target) -> Iterator[Case]:
    """Waits until a file is there."""
    yield Case(name="first", run=lambda: [ROW])
    yield Case(name="second", run=lambda: waits(target.folder / "gate"))


def waits(gate: Path) -> Rows:
    """A row, once the file is there."""
    while not gate.exists():
        time.sleep(0.02)
    return [ROW]


def no_cases(target: Target) -> Iterator[Case]:
    """A part that fails outside of its cases."""
    raise ImportError("no module named nothing")


def poisons() -> Rows:
    """What a kernel that writes beside its memory does: nothing works in its process any more."""
    os.environ[_STICKY] = "1"
    return fails("sticky")


def last() -> Rows:
    """A row, from a process that still works."""
    return fails("still sticky") if _STICKY in os.environ else [ROW]


def work() -> None:
    """The worker, but for torch."""
    options = worker.parsed()
    worker.end_with(os.getppid())
    worker.answers = lambda target: _STICKY not in os.environ
    record = Record(options.file, {"part": options.part, "device": "none", "is_rehearsal": True})
    worker.go(options.cases, record, Target(device="cpu", folder=options.file.parent, out=options.out))


def measure(folder: Path) -> bool:
    """The whole command over two parts, going on where files are."""
    parts = [Part("gated", f"{HERE}:gated", 600, ""), Part("late", f"{HERE}:late", 3, "")]
    options = argparse.Namespace(
        chosen=parts,
        out=folder,
        work=folder,
        minutes=10,
        patience=1.0,
        device="cpu",
        rivals=None,
        commit=None,
    )
    for part in parts:
        command.prepare(folder / f"{part.name}.json", resumes=True)
    return command.measure(options, worker=HERE)


if __name__ == "__main__":
    if sys.argv[1] == "measure":
        sys.exit(not measure(Path(sys.argv[2])))
    work()
