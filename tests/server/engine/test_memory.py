"""Freed memory goes back to the system."""

import ctypes
import subprocess
import sys

import pytest
import torch

from kvq.server.engine.memory import Memory

_FREED = """
import torch
from kvq.server.engine.memory import Memory

def resident():
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) << 10

memory = Memory(torch.device("cpu"), every_s=0)
held = [b"x" * (64 << 10) for _ in range(1600)]  # 100 MiB in pieces that are not mapped one by one
last = b"x" * (64 << 10)  # keeps the heap's end where it is
full = resident()
del held
before = resident()
assert memory.tend()
print(full - before >> 20, before - resident() >> 20)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="no glibc")
def test_what_was_freed_is_given_back():
    ran = subprocess.run([sys.executable, "-c", _FREED], capture_output=True, text=True, check=True)
    kept, returned = map(int, ran.stdout.split())
    assert kept + returned > 90
    assert returned > 60, f"the C library gave {kept} MiB back by itself"


def test_only_so_often():
    memory = Memory(torch.device("cpu"), every_s=1000)
    assert memory.left_s is None
    assert not memory.tend()
    assert not memory.tend()
    assert 900 < memory.left_s <= 1000


def test_nobody_waits_for_what_was_given_back():
    memory = Memory(torch.device("cpu"), every_s=0)
    memory.tend()
    assert memory.left_s is None
