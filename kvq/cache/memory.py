"""Free memory of a device, and allocations that are checked in advance."""

import mmap
import os

import torch

from kvq.cache.heap import give_back
from kvq.errors import OutOfMemory
from kvq.kernels.native.pages import prefer_huge_pages
from kvq.sizes import binary

_REMEDIES = {
    "KvqCache's scratch memory": "attend with 'kvq', or use a shorter context or a smaller batch",
    "KvqCache's recent tokens": "lower residual_length or the batch size",
    "the KV pool": "use a shorter context, fewer sequences or a smaller format such as int4",
}


def available_bytes(device: torch.device) -> int | None:
    """Return the number of free bytes on the device, including PyTorch's cached memory; None if unknown."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def held_bytes(device: torch.device) -> int:
    """Return the bytes in use by PyTorch's tensors on a GPU, or by this process on a CPU; 0 if unknown.

    Memory-mapped files, including libraries, don't count.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    give_back()
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            resident, shared = map(int, file.read().split()[1:3])
            return (resident - shared) * mmap.PAGESIZE
    except OSError:  # not Linux
        return 0


def check_room(nbytes: int, device: torch.device, *, purpose: str = "the KV pool") -> None:
    """Raise OutOfMemory if the device has less than `nbytes` free. Allocates nothing."""
    free = available_bytes(device)
    if free is not None and nbytes > free:
        raise _refusal(nbytes, free, device, purpose)


def allocate_bytes(nbytes: int, device: torch.device, *, purpose: str = "the KV pool") -> torch.Tensor:
    """Return a zeroed uint8 tensor of `nbytes` that can be written in any torch mode.

    Raises:
        OutOfMemory: the device has too little free memory; nothing was allocated.
    """
    check_room(nbytes, device, purpose=purpose)
    try:
        with torch.inference_mode(False):  # or a pool enlarged in inference mode is read-only outside it
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
            if device.type == "cpu":
                prefer_huge_pages(memory)  # the blocks of a sequence are scattered over the pool
            return memory.zero_()
    except (RuntimeError, MemoryError) as error:  # torch reports a full device as RuntimeError
        raise _refusal(nbytes, available_bytes(device), device, purpose) from error


def _refusal(nbytes: int, free: int | None, device: torch.device, purpose: str) -> OutOfMemory:
    left = "an unknown amount" if free is None else binary(free)
    return OutOfMemory(
        f"{purpose} needs {binary(nbytes)} on {device}, but {left} is free; {_REMEDIES[purpose]}"
    )
