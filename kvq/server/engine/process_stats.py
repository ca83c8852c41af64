"""What the engine process measures of itself for `/metrics`, and the memory that it gives back."""

import os
from collections.abc import Iterable
from time import monotonic

import torch

from kvq.cache.heap import give_back
from kvq.engine.requests.outputs import Timing
from kvq.engine.requests.request_state import Job

_MEMORY_EVERY_S = 1.0
_GIVE_BACK_EVERY_S = 30.0


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


class Heap:
    """Gives back what the C library keeps of freed memory, now and then.

    A prompt's activations are freed and cut up for smaller things; glibc then keeps most of their pages. On
    the mixed load of benchmarks/reliability.py that was 49 of 75 MB gained in the first minute. Giving them
    back takes 0.3 to 2 ms.
    """

    def __init__(self, every_s: float = _GIVE_BACK_EVERY_S) -> None:
        self._every_s = every_s
        self._trimmed_s = monotonic()
        self._is_used = False

    @property
    def left_s(self) -> float | None:
        """Seconds until it is time to; None: nothing was done since the last time."""
        return max(0.0, self._trimmed_s + self._every_s - monotonic()) if self._is_used else None

    def tend(self) -> bool:
        """Give memory back if it is time to; True if this was done. Called after whatever was done."""
        now = monotonic()
        self._is_used = now - self._trimmed_s < self._every_s
        if self._is_used:
            return False
        self._trimmed_s = now
        return give_back()


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
