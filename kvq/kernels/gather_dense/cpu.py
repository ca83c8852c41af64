"""`gather_dense` in C++ for CPUs."""

from typing import Any

import torch
from torch import Tensor

from kvq.errors import ConfigError
from kvq.kernels.native.abi import DTYPES, entries_of, layer_of, struct
from kvq.kernels.native.library import run
from kvq.kernels.paged import PagedKV


def gather_dense(
    kv: PagedKV,
    tables: Tensor,
    start: int,
    end: int,
    *,
    unrotate: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Do what the reference does, bit for bit; see reference.py.

    Raises:
        IndexError: a table names a block outside the pool.
        ConfigError: positions or shapes are invalid.
    """
    tables = entries_of(tables)
    if not 0 <= start <= end:
        raise ConfigError(f"positions must be 0 <= start <= end, got {start} and {end}")
    out = kv.dense(len(tables), end - start) if out is None else out
    for x, dim in zip(out, (kv.formats.k_head_dim, kv.formats.v_head_dim), strict=True):
        shape = [len(tables), kv.k.codes.shape[1], end - start, dim]
        if list(x.shape) != shape or x.dtype not in DTYPES:
            raise ConfigError(f"out must be float {shape}, got {x.dtype} {list(x.shape)}")
    sizes = tables.shape[1], len(tables), start, end, kv.block_size
    positions = struct("KvqPositions")(tables.data_ptr(), tables.stride(0), *sizes)
    run("gather_dense", layer_of(kv), positions, *map(_gathered, out), unrotate, torch.get_num_threads())
    return out


def _gathered(x: Tensor) -> Any:
    assert x.stride(3) == 1, "token rows are contiguous"
    strides = (stride * x.element_size() for stride in x.stride()[:3])
    return struct("KvqGathered")(x.data_ptr(), *strides, DTYPES[x.dtype])
