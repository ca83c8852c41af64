"""Running generated programs: each in a process of its own, with limits, in a folder that is thrown away."""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_CHILD = Path(__file__).with_name("confined.py")
_TOLD = 300  # characters of an error


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of one program."""

    cpu_s: int = 5
    wall_s: float = 15.0
    memory_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a program: success, or what prevented it."""

    passed: bool
    reason: str = ""


def run(program: str, limits: Limits = Limits()) -> Outcome:
    """Run Python source; it passed if it ran through, not if it left early with whatever code."""
    mark = secrets.token_hex(16)
    command = [sys.executable, "-I", str(_CHILD), mark, str(limits.cpu_s), str(limits.memory_bytes)]
    with tempfile.TemporaryDirectory(prefix="kvq-real-") as folder:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env={"PATH": os.defpath},
            start_new_session=True,
        )
        try:
            out, errors = child.communicate(program.encode("utf-8", "replace"), timeout=limits.wall_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            return Outcome(False, f"ran longer than {limits.wall_s:g} s")
    if out.decode("ascii", "replace") == mark:
        return Outcome(True)
    if child.returncode < 0:
        return Outcome(False, f"ended by {signal.Signals(-child.returncode).name}")
    last = errors.decode("utf-8", "replace").strip().rpartition("\n")[2]
    return Outcome(False, last[:_TOLD] or "left before its end")
