"""Memory of the engine process: usage for `/metrics`, and return of freed memory to the system."""

import os
from time import monotonic

import torch

from kvq.cache.heap import give_back

_MEMORY_EVERY_S = 1.0
_GIVE_BACK_EVERY_S = 30.0


class Memory:
    """Memory of this process: measures usage at most once a second, and returns freed memory at intervals.

    After a prompt's activations are freed, smaller allocations reuse parts of their pages, and glibc keeps
    most of the pages. Under the mixed load of benchmarks/reliability.py, this caused 49 of the 75 MB of
    growth in the first minute. Returning the pages takes 0.3 to 2 ms.
    """

    def __init__(self, device: torch.device, every_s: float = _GIVE_BACK_EVERY_S) -> None:
        self._device = device
        self._bytes: dict[str, int] = {}
        self._looked_s = -_MEMORY_EVERY_S
        self._every_s = every_s
        self._trimmed_s = monotonic()
        self._is_used = False

    def look(self) -> dict[str, int]:
        """Return bytes per device: resident memory on the host, memory reserved by PyTorch on a GPU."""
        now = monotonic()
        if now - self._looked_s >= _MEMORY_EVERY_S:
            self._looked_s = now
            self._bytes = _host_bytes() | _device_bytes(self._device)
        return self._bytes

    @property
    def left_s(self) -> float | None:
        """Seconds until freed memory is to be returned, or None if no work was done since the last return."""
        return max(0.0, self._trimmed_s + self._every_s - monotonic()) if self._is_used else None

    def tend(self) -> bool:
        """Return freed memory to the system if due, and return True if so. Call this after any work."""
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
