"""Generated programs pass if they run through, and can't take the machine with them."""

import sys

import pytest

from benchmarks.real.sandbox import Limits, run
from tests.waiting import HANG_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits are Linux'")


def test_a_program_that_runs_through_has_passed():
    assert run(
        "import math, random, re, collections, itertools\nassert math.sqrt(4) == 2\nprint('x' * 9)"
    ).passed


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("assert 1 == 2", "AssertionError"),
        ("def f(:", "SyntaxError"),
        ("import sys; sys.exit(0)", "before its end"),
        ("import os; os._exit(0)", "before its end"),
        ("raise SystemExit", "before its end"),
    ],
)
def test_a_program_that_ends_otherwise_has_not(program, reason):
    found = run(program)
    assert not found.passed
    assert reason in found.reason


def test_an_endless_loop_is_ended_by_its_processor_time():
    found = run("while True: pass", Limits(cpu_s=1, wall_s=HANG_S))
    assert not found.passed
    assert found.reason in ("ended by SIGXCPU", "ended by SIGKILL")


def test_one_that_waits_is_ended_by_the_clock():
    found = run("import time; time.sleep(1000)", Limits(wall_s=0.5))
    assert (found.passed, found.reason) == (False, "ran longer than 0.5 s")


def test_one_that_takes_memory_gets_none():
    found = run("x = bytearray(1 << 34)")
    assert not found.passed
    assert "MemoryError" in found.reason


@pytest.mark.parametrize(
    "program",
    [
        "open({path!r}, 'w').write('x')",
        "import os; os.open({path!r}, os.O_CREAT | os.O_WRONLY)",
        "import pathlib; pathlib.Path({path!r}).touch()",
        "import os; os.mkdir({path!r})",
        "import shutil; shutil.copy(__import__('os').__file__, {path!r})",
        "import os; os.system('touch ' + {path!r})",
        "import subprocess; subprocess.run(['touch', {path!r}])",
        "import os; os.fork()",
        "import socket; socket.socket()",
        "import os, signal; os.kill(os.getppid(), signal.SIGTERM)",
        "import ctypes; ctypes.CDLL(None)",
    ],
)
def test_files_processes_and_the_network_are_out_of_reach(tmp_path, program):
    path = tmp_path / "made"
    found = run(program.format(path=str(path)))
    assert not found.passed
    assert "PermissionError" in found.reason
    assert not path.exists()


def test_a_file_is_not_removed(tmp_path):
    file = tmp_path / "file"
    file.touch()
    assert "PermissionError" in run(f"import os; os.remove({str(file)!r})").reason
    assert file.exists()
