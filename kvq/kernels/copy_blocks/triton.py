"""`copy_blocks` in Triton: one launch copies every run of every pair."""

from collections.abc import Sequence

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from kvq.kernels.copy_blocks.reference import copy_together, final_sources
from kvq.kernels.uploads import upload_all

_CHUNK = 8192  # bytes of one program
_WIDTH = 16  # bytes that a thread moves at once


def copy_blocks(parts: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """Do what the reference does; see reference.py."""
    origin = final_sources(pairs)
    if not origin:
        return
    if set(origin) & set(origin.values()):  # a block is read and written: gather all first
        copy_together(parts, pairs)
        return
    largest = max(part.shape[1] for part in parts)
    places = [(part.data_ptr(), part.stride(0), part.shape[1]) for part in parts]
    arrays = [np.array(numbers, np.int64) for numbers in (list(origin.items()), places)]
    moved, runs = upload_all(arrays, parts[0].device)  # [pairs, (target, source)], [runs, 3]
    aligned = not any(n % _WIDTH for part in parts for n in (part.data_ptr(), part.stride(0), part.shape[1]))
    _copy_kernel[(len(moved), len(parts), triton.cdiv(largest, _CHUNK))](
        moved, runs, CHUNK=_CHUNK, WIDTH=_WIDTH if aligned else 1, num_warps=4
    )


@triton.jit
def _copy_kernel(moved_ptr, runs_ptr, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """Copy runs of bytes. Grid: (pairs, runs of a block, chunks of a run). WIDTH: 16 if aligned, else 1."""
    target = tl.load(moved_ptr + 2 * tl.program_id(0))
    source = tl.load(moved_ptr + 2 * tl.program_id(0) + 1)
    run = runs_ptr + 3 * tl.program_id(1)
    stride, nbytes = tl.load(run + 1), tl.load(run + 2)
    if WIDTH == 16:
        words = tl.multiple_of(tl.load(run), 16).to(tl.pointer_type(tl.int32))
        from_at = tl.multiple_of(source * (stride // 4), 4)
        to_at = tl.multiple_of(target * (stride // 4), 4)
        at = tl.program_id(2) * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
        mask = at < tl.multiple_of(nbytes // 4, 4)
        tl.store(words + to_at + at, tl.load(words + from_at + at, mask=mask), mask=mask)
    else:
        base = tl.load(run).to(tl.pointer_type(tl.uint8))
        at = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
        there = tl.load(base + source * stride + at, mask=at < nbytes)
        tl.store(base + target * stride + at, there, mask=at < nbytes)
