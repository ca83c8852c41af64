"""Memory in pages of 2 MiB; with small pages, nearly every read in a step requires a page-table walk."""

import contextlib
import ctypes
import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20  # bytes
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux has it
_MAPPED = 64 << 20  # bytes of addresses at a time; pages that are never written take no memory
_LEAST = 64 << 10  # bytes; smaller tensors are allocated by torch
_LINE = 64  # bytes; alignment of every tensor


def prefer_huge_pages(memory: Tensor) -> None:  # D56: advice only, for the pool
    """Ask Linux for 2 MiB pages if the memory is not in use yet and is large enough to contain some."""
    first = -(-memory.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    last = (memory.data_ptr() + memory.nbytes) // _HUGE_PAGE * _HUGE_PAGE
    if _ADVICE is not None and first < last:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _ADVICE)


class _Pages:
    """Allocator of tensors of any size in 2 MiB pages, which are freed with the last tensor in them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped: Callable[[], mmap.mmap | None] = lambda: None
        self._at = self._end = 0

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor of `count` numbers."""
        nbytes = -(-count * dtype.itemsize // _LINE) * _LINE
        with self._lock:
            mapped = self._mapped()
            if mapped is None or self._at + nbytes > self._end:
                mapped = self._map(max(nbytes, _MAPPED))
            found = torch.frombuffer(mapped, dtype=dtype, count=count, offset=self._at)
            self._at += nbytes
            return found

    def _map(self, nbytes: int) -> mmap.mmap:
        mapped = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        assert _ADVICE is not None, "only Linux is asked"
        with contextlib.suppress(OSError):  # a kernel without such pages has others
            mapped.madvise(_ADVICE)
        self._at = -torch.frombuffer(mapped, dtype=torch.uint8).data_ptr() % _HUGE_PAGE
        self._end = self._at + nbytes
        self._mapped = weakref.ref(mapped)  # tensors keep it
        return mapped


_pages = _Pages()


def _renew() -> None:
    """Start anew in a child process, since a thread of the parent may have held the lock."""
    global _pages
    _pages = _Pages()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


def own_pages() -> Callable[[int, torch.dtype], Tensor]:
    """Return a function like `_Pages.take`, for tensors that are freed together, but not with others."""
    return _Pages().take if _ADVICE is not None else lambda count, dtype: torch.empty(count, dtype=dtype)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:  # D165
    """Return `torch.empty` on a CPU, with large tensors placed next to each other in pages of 2 MiB.

    Use this for tensors that are freed together, such as a model's weights: one tensor keeps all 64 MiB.
    """
    count = math.prod(shape)
    if _ADVICE is None or count * dtype.itemsize < _LEAST:
        return torch.empty(*shape, dtype=dtype)
    return _pages.take(count, dtype).view(*shape)
