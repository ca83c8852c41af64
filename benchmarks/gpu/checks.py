"""The tests that need a GPU, by many processes; a few of them under compute-sanitizer when asked."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.case import Case, Rows, Target
from benchmarks.gpu.facts import has

ROOT = Path(__file__).resolve().parents[2]
_PROCESSES = 12
_NO_TESTS = 5  # pytest's status where all of them need a GPU that isn't there


def tests(target: Target) -> Iterator[Case]:
    """All of tests/gpu; one that hangs is ended alone where pytest-timeout is installed."""
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-rfE", "--durations=10"]
    command += ["-p", "no:cacheprovider", "--maxfail=40"]
    if has("xdist"):
        count = target.pick(min(_PROCESSES, os.cpu_count() or 1), 0)
        command += ["-n", str(count)]
    if has("pytest_timeout"):
        command += ["--timeout", "90"]
    yield Case(name="tests/gpu", run=lambda: ran(target, command), limit_s=190)


def sanitizer(target: Target) -> Iterator[Case]:
    """Tests named `reduced`, whose memory accesses are watched."""
    checker = shutil.which("compute-sanitizer")
    if checker is not None or target.is_rehearsal:
        watch = [checker, "--tool", "memcheck", "--error-exitcode", "9"] if checker else []
        command = [*watch, sys.executable, "-m", "pytest", "tests/gpu", "-q", "-k", "reduced"]
        yield Case(name="compute-sanitizer", run=lambda: ran(target, command), limit_s=290)


def ran(target: Target, command: list[str]) -> Rows:
    """Run pytest; returns its summary and the tests that failed. Its output is in the log."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        assert run.stdout is not None, "it was asked for"
        lines = []
        for line in run.stdout:
            print(line, end="", flush=True)
            lines.append(line.strip())
    bad = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    counts = dict(re.findall(r"(\w+)=(\d+)", _counted(lines)))
    return [
        {
            "passed": run.returncode == 0 or (target.is_rehearsal and run.returncode == _NO_TESTS),
            "status": run.returncode,
            "summary": next((line for line in reversed(lines) if line), ""),
            "counts": {name: int(count) for name, count in counts.items()},
            "failures": [line[:300] for line in bad[:40]],
        }
    ]


def _counted(lines: list[str]) -> str:
    """pytest's last line, `3 failed, 120 passed in 61.2s`, as `failed=3 passed=120`."""
    last = next((line for line in reversed(lines) if re.search(r"\d+ \w+.* in [\d.]+s", line)), "")
    return " ".join(f"{name}={count}" for count, name in re.findall(r"(\d+) ([a-z]+)", last.split(" in ")[0]))
