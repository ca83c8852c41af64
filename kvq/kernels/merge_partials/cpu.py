"""`merge_partials` in C++ for CPUs."""

import ctypes

import torch
from torch import Tensor

from kvq.errors import ConfigError
from kvq.kernels.native.library import check, loaded


def merge_partials(outs: Tensor, lses: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Do what the reference does; see there.

    Raises:
        ConfigError: shapes that don't fit each other.
    """
    if lses.shape != outs.shape[:3] or (sinks is not None and sinks.shape != outs.shape[2:3]):
        raise ConfigError(
            f"outs are {list(outs.shape)}, so lses must be {list(outs.shape[:3])} and sinks "
            f"[{outs.shape[2]}], got {list(lses.shape)} and {None if sinks is None else list(sinks.shape)}"
        )
    outs, lses = outs.float().contiguous(), lses.float().contiguous()
    parts, tokens, heads, dim = outs.shape
    sinks = None if sinks is None else sinks.float().contiguous()
    out, lse = torch.empty(tokens, heads, dim), torch.empty(tokens, heads)
    check(
        loaded().merge_partials(
            ctypes.c_void_p(outs.data_ptr()),
            ctypes.c_void_p(lses.data_ptr()),
            ctypes.c_void_p(None if sinks is None else sinks.data_ptr()),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_void_p(lse.data_ptr()),
            parts,
            ctypes.c_int64(tokens * heads),
            heads,
            dim,
        )
    )
    return out, lse
