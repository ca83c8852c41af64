"""`copy_blocks` in C++ for CPUs."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kvq.errors import ConfigError
from kvq.kernels.native.abi import struct
from kvq.kernels.native.library import run

_Run = struct("KvqRun")


def copy_blocks(parts: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """Do what the reference does; see reference.py.

    Raises:
        IndexError: a pair names a block outside the pool; nothing was copied.
        ConfigError: a part is not bytes with contiguous rows.
    """
    if not pairs or not parts:
        return
    if any(part.dtype is not torch.uint8 or part.dim() != 2 or part.stride(1) != 1 for part in parts):
        raise ConfigError("parts must be uint8 [num_blocks, run bytes] with contiguous rows")
    runs = [_Run(part.data_ptr(), part.stride(0), part.shape[1], part.shape[0]) for part in parts]
    flat = (ctypes.c_int64 * (2 * len(pairs)))(*(block for pair in pairs for block in pair))
    run("copy_blocks", (_Run * len(runs))(*runs), len(runs), flat, len(pairs), torch.get_num_threads())
