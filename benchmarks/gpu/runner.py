"""Runs parts, each in a process of its own: what hangs, crashes or takes too long costs its own case."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu import record
from benchmarks.gpu.parts import Part
from benchmarks.gpu.worker import POISONED

ROOT = Path(__file__).resolve().parents[2]
WORKER = "benchmarks.gpu.worker"
_LEAST_S = 10.0  # a part with less time left is not begun
_POLL_S = 0.1
_START = "(start)"  # what failed when a process dies before its first case


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Run of all parts: their files, their deadline, and the listener of changes."""

    folder: Path  # a file a part
    log: Path
    ends_at: float  # on the monotonic clock
    options: Sequence[str] = ()  # of workers
    worker: str = WORKER  # the module that runs a part
    patience: float = 1.0  # times every limit
    changed: Callable[[Part], None] = lambda part: None

    def file(self, part: Part) -> Path:
        """The part's file."""
        return self.folder / f"{part.name}.json"

    @property
    def left_s(self) -> float:
        """Seconds until the end."""
        return self.ends_at - time.monotonic()


def run_part(part: Part, run: Run) -> str:  # D152: a part is a process; failures tried in pieces
    """Run a part to its end, or that of its time; returns its status.

    ended: every case was tried. stopped: the time was over. broken: its process failed outside of its cases.
    skipped: no time was left for it. Without a file it could not even begin.
    """
    limit_s = run.patience * part.limit_s
    if run.left_s < min(_LEAST_S, limit_s):
        return "skipped"
    ends_at = time.monotonic() + min(limit_s, run.left_s)
    status = "running"
    while status == "running":
        status = _one_process(part, run, ends_at)
    return status


def _one_process(part: Part, run: Run, ends_at: float) -> str:
    """Start the part's process, go on where the last one died; "running" if another one is to follow."""
    command = [sys.executable, "-m", run.worker, part.name, part.cases]
    command += ["--file", str(run.file(part)), *run.options]
    with run.log.open("ab") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=_environment(run), stdout=log, stderr=log, process_group=0
        )
        try:
            reason = _watch(process, part, run, ends_at)
        finally:
            _kill(process)
    state = record.read(run.file(part))
    if process.returncode == 0:
        return "ended"
    status = "stopped" if time.monotonic() >= ends_at else "running"
    if state is None:
        return "stopped" if status == "stopped" else "broken"
    if state["running"] is None and process.returncode == POISONED:
        return status
    name = _START
    if state["running"] is not None:
        name = state["running"]["case"]
    elif status == "running":
        status = "broken"
    record.write(run.file(part), record.failed(state, name, reason) | {"status": status})
    run.changed(part)
    return status


def _watch(process: "subprocess.Popen[bytes]", part: Part, run: Run, ends_at: float) -> str:
    """Wait until a process ends, or its case's or part's time does; returns how it ended."""
    seen = None
    while process.poll() is None:
        time.sleep(_POLL_S)
        state = record.read(run.file(part))
        if state != seen:
            seen = state
            run.changed(part)
        running = None if state is None else state["running"]
        if time.monotonic() >= ends_at:
            return "stopped: the part's time was over"
        if running is not None and time.time() > running["since"] + run.patience * running["limit_s"]:
            return f"stopped after {run.patience * running['limit_s']:.0f} s"
    if process.returncode < 0:
        return f"its process was ended by {signal.Signals(-process.returncode).name}"
    return f"its process ended with status {process.returncode}"


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """End a process and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _environment(run: Run) -> dict[str, str]:
    """Workers import this tree, share one cache of compiled kernels, and fetch nothing."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    is_rehearsal = "cpu" in run.options
    given = {
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "TRITON_INTERPRET": "1" if is_rehearsal else "0",
        "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", str(run.folder / "triton")),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return {**os.environ, **given}
