"""A part's process: its cases one after the other, each written down as soon as it ends.

    python3 -m benchmarks.gpu.worker decode benchmarks.gpu.attention:decode --file F --device cuda ...

Started again after it died, it goes on behind the case that killed it.
"""

import argparse
import gc
import importlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.gpu.case import Case, Target
from benchmarks.gpu.record import Record, State

POISONED = 75  # exit status: the device answers this process no more; another one may go on


def main() -> None:
    """Run what is left of a part."""
    options = parsed()
    end_with(os.getppid())
    target = Target(device=options.device, folder=options.file.parent, out=options.out, rivals=options.rivals)
    if target.is_rehearsal:
        from benchmarks.gpu import rehearsal

        rehearsal.install()
    go(options.cases, Record(options.file, header(options.part, target, options.commit)), target)


def parsed() -> argparse.Namespace:
    """Parse the runner's options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part")
    parser.add_argument("cases", help="module:function")
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--commit")
    parser.add_argument("--rivals", type=Path)
    return parser.parse_args()


def go(cases: str, record: Record, target: Target) -> None:
    """Run what is left of the cases that `module:function` yields."""
    module, _, function = cases.partition(":")
    run(getattr(importlib.import_module(module), function)(target), record, target)


def run(cases: Iterable[Case], record: Record, target: Target) -> None:
    """Every case that has not been tried, and the pieces of those that failed."""
    for case in left(cases, record):
        record.begin(case.name, case.limit_s)
        try:
            rows = case.run()
            record.done(case.name, rows)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other cases are measured
            traceback.print_exc()
            record.fail(case.name, f"{type(error).__name__}: {error}"[:500])
            del error
        gc.collect()
        if not answers(target):
            sys.exit(POISONED)
    record.end()


def left(cases: Iterable[Case], record: Record) -> Iterator[Case]:
    """Return what is still to be tried; called after each, so that pieces follow what just failed."""
    for case in cases:
        if not record.is_done(case.name) and not record.has_failed(case.name):
            yield case
        if record.has_failed(case.name):
            yield from left(case.pieces, record)


def answers(target: Target) -> bool:
    """Give freed memory back; False if the device reports an error, as it does for good after some."""
    if target.is_rehearsal:
        return True
    import torch

    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        traceback.print_exc()
        return False
    return True


def header(part: str, target: Target, commit: str | None) -> State:
    """The envelope of a part's figures."""
    import torch

    from kvq.evals.report.results import envelope

    result = envelope(sys.argv, torch.device(target.device), [], {"part": part})
    result["commit"] = result["commit"] or commit
    result["versions"]["triton"] = _version("triton")
    result["is_rehearsal"] = target.is_rehearsal
    return result


def _version(package: str) -> str | None:
    try:
        return str(importlib.import_module(package).__version__)
    except ImportError:
        return None


def end_with(parent: int) -> None:
    """End this process when the one that started it is gone."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()
