"""Busy processes beside what is measured."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Ends by itself if nobody is left to end it.
_ARITHMETIC = """
import os, sys
number = 1
while os.getppid() == int(sys.argv[1]):
    for _ in range(1_000_000):
        number = number * 3 % 1_000_003
"""


@contextmanager
def neighbours(count: int) -> Iterator[list[int]]:
    """The ids of `count` processes that do nothing but arithmetic, at this process's priority, meanwhile."""
    command = [sys.executable, "-IS", "-c", _ARITHMETIC, str(os.getpid())]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
