"""Time and memory that a piece of work took."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kvq.sizes import binary


@dataclass(kw_only=True, slots=True)
class Used:
    """Resources of a piece of work, set when it ends. Peaks are of the process, including earlier work."""

    seconds: float = 0.0
    peak_bytes: int = 0  # most memory that the process ever had in RAM
    grown_bytes: int = 0  # growth of that peak during the work; 0 if an earlier peak was higher
    device_peak_bytes: int | None = None  # most that tensors took on the GPU during the work

    def line(self) -> str:
        """Return the figures in words."""
        words = f"{self.seconds:,.1f} s, peak memory {binary(self.peak_bytes)} (+{binary(self.grown_bytes)})"
        return words if self.device_peak_bytes is None else f"{words}, GPU {binary(self.device_peak_bytes)}"


@contextmanager
def measured(device: torch.device) -> Iterator[Used]:
    """Measure the time and memory of a block of code."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    used = Used()
    before, began = _peak_bytes(), time.perf_counter()
    try:
        yield used
    finally:
        if on_gpu:
            torch.cuda.synchronize(device)
            used.device_peak_bytes = torch.cuda.max_memory_allocated(device)
        used.seconds = time.perf_counter() - began
        used.peak_bytes = _peak_bytes()
        used.grown_bytes = used.peak_bytes - before


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # KiB on Linux
