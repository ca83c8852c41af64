"""`gather_dense` in C++ for CPUs."""

import ctypes

import torch
from torch import Tensor

from kvq.errors import ConfigError
from kvq.kernels.native.library import check, loaded
from kvq.kernels.native.structs import DTYPES, Gathered, Positions, entries_of, layer_of
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
    """Do what the reference does, with the same bits; see there.

    Raises:
        IndexError: a table names a block outside the pool.
        ConfigError: positions or shapes that don't fit.
    """
    tables = entries_of(tables)
    shape = (tables.shape[0], kv.k.codes.shape[1], end - start)
    dims = (kv.formats.k_head_dim, kv.formats.v_head_dim)
    if not 0 <= start <= end:
        raise ConfigError(f"positions must be 0 <= start <= end, got {start} and {end}")
    if out is None:
        out = (torch.empty(*shape, dims[0]), torch.empty(*shape, dims[1]))
    for x, dim in zip(out, dims, strict=True):
        if x.shape != (*shape, dim) or x.dtype not in DTYPES:
            raise ConfigError(f"out must be float {[*shape, dim]}, got {x.dtype} {list(x.shape)}")
    positions = Positions(
        tables.data_ptr(), tables.stride(0), tables.shape[1], len(tables), start, end, kv.block_size
    )
    k, v = (_gathered(x) for x in out)
    check(
        loaded().gather_dense(
            ctypes.byref(layer_of(kv)),
            ctypes.byref(positions),
            ctypes.byref(k),
            ctypes.byref(v),
            int(unrotate),
            torch.get_num_threads(),
        )
    )
    return out


def _gathered(x: Tensor) -> Gathered:
    assert x.stride(3) == 1, "token rows are contiguous"
    strides = (stride * x.element_size() for stride in x.stride()[:3])
    return Gathered(x.data_ptr(), *strides, DTYPES[x.dtype])
