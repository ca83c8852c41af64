"""Large pages for memory that is about to be filled."""

import ctypes
import mmap

from torch import Tensor

_HUGE_PAGE = 2 << 20  # bytes


def prefer_huge_pages(memory: Tensor) -> None:
    """Ask Linux for pages of 2 MiB, if the memory is not in use yet and large enough to have some.

    Blocks of a sequence lie anywhere in a pool: with small pages nearly every block that attention reads
    costs walks through the page tables. And memory is filled sooner if it comes in fewer pages.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    first = -(-memory.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    last = (memory.data_ptr() + memory.nbytes) // _HUGE_PAGE * _HUGE_PAGE
    if advice is not None and first < last:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)
