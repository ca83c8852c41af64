"""What the engine process measures for `/metrics` beside the scheduler's own counters."""

import os
from collections.abc import Iterable
from time import monotonic

import torch

from kvq.engine.job import Job
from kvq.engine.outputs import Timing

_MEMORY_EVERY_S = 1.0


class Gaps:
    """Times between neighbouring tokens, each told once, while requests run."""

    def __init__(self) -> None:
        self._told: dict[int, int] = {}  # request number: how many were told
        self._gaps: list[float] = []

    def end(self, number: int, timing: Timing) -> None:
        """A request ended."""
        self._gaps += timing.itl_s[self._told.pop(number, 0) :]

    def take(self, running: Iterable[tuple[int, Job]]) -> list[float]:
        """The gaps since the last call."""
        for number, job in running:
            found = job.timing.itl_s
            if found:
                self._gaps += found[self._told.get(number, 0) :]
                self._told[number] = len(found)
        gaps, self._gaps = self._gaps, []
        return gaps


class Memory:
    """Bytes that this process holds, looked up once a second at most."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes: dict[str, int] = {}
        self._looked_s = -_MEMORY_EVERY_S

    def look(self) -> dict[str, int]:
        """By device: resident on the host, reserved by PyTorch on a GPU."""
        now = monotonic()
        if now - self._looked_s >= _MEMORY_EVERY_S:
            self._looked_s = now
            self._bytes = _host_bytes() | _device_bytes(self._device)
        return self._bytes


def _host_bytes() -> dict[str, int]:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return {"host": int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")}
    except OSError:  # not Linux
        return {}


def _device_bytes(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return {}
    index = torch.cuda.current_device() if device.index is None else device.index
    return {f"cuda:{index}": torch.cuda.memory_reserved(index)}
