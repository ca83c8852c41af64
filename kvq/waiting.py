"""How the threads of a process wait for each other, chosen before torch loads its OpenMP runtime.

A thread that has done its part of a product waits for the others, first spinning, then asleep. libgomp, which
torch's Linux wheels bring, spins 300,000 times: 3 ms on CPUs of 2010, 18 ms on Intel's since Skylake, whose
pause instruction takes 140 cycles. Beside a busy process that is longer than a slice of the scheduler: a
thread spins on the core that the one it waits for should have, at every step of every layer. 150 tokens of
a small model then took 38 s in place of 0.5. Never to spin costs up to three times the time on a quiet
machine, where threads wait a few microseconds. Half a millisecond bridges what Python does between products,
and is far below a slice.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SPIN_S = 0.6e-3
_CHOSEN_BY_USERS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")
_OWN = 300_000  # libgomp's count
_HEAD_BYTES = 8192  # of /proc/cpuinfo, where the first CPU is described
# Cycles of the pause instruction. Source: uops.info; Intel's optimization manual, 2.5.4 (Skylake).
_PAUSE_CYCLES = {"AuthenticAMD": 65, "GenuineIntel": 10}
_LONG_PAUSE_CYCLES = 140  # Intel's since Skylake, the first that flush cache lines in any order
_USUAL_HZ = 2.5e9


def waiting_environment() -> dict[str, str]:
    """What the environment of a process that will load torch lacks; nothing where a user chose."""
    if sys.platform != "linux" or any(map(os.environ.get, _CHOSEN_BY_USERS)):
        return {}
    return {"GOMP_SPINCOUNT": str(spin_count(_read_cpu()))}


@contextmanager
def short_spins() -> Iterator[None]:
    """Around imports that may load torch: libgomp reads its environment once, when it is loaded."""
    added = {} if "torch" in sys.modules else waiting_environment()
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def spin_count(cpu: str) -> int:
    """Spins that take about half a millisecond on the CPU that /proc/cpuinfo's text describes."""
    lines = [line.partition(":") for line in cpu.splitlines()]
    facts = {name.strip(): value.strip() for name, _, value in lines}
    cycles = _PAUSE_CYCLES.get(facts.get("vendor_id", ""))
    if cycles is None:  # Arm's pause takes no time: libgomp's count is 0.3 ms there
        return _OWN
    if facts["vendor_id"] == "GenuineIntel" and "clflushopt" in facts.get("flags", "").split():
        cycles = _LONG_PAUSE_CYCLES
    return round(_SPIN_S * _USUAL_HZ / cycles)


def _read_cpu() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            return file.read(_HEAD_BYTES)
    except OSError:
        return ""
