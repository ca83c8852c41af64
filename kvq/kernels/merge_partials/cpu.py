"""`merge_partials` in C++ for CPUs."""

import torch
from torch import Tensor

from kvq.errors import ConfigError
from kvq.kernels.native.abi import DTYPES
from kvq.kernels.native.library import run


def merge_partials(outs: Tensor, lses: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Do what the reference does; see reference.py.

    Raises:
        ConfigError: the shapes don't match.
    """
    if lses.shape != outs.shape[:3] or (sinks is not None and sinks.shape != outs.shape[2:3]):
        raise ConfigError(
            f"outs are {list(outs.shape)}, so lses must be {list(outs.shape[:3])} and sinks "
            f"[{outs.shape[2]}], got {list(lses.shape)} and {None if sinks is None else list(sinks.shape)}"
        )
    outs, lses = outs.float().contiguous(), lses.float().contiguous()
    parts, tokens, heads, dim = outs.shape
    sinks = None if sinks is None else sinks.float().contiguous()
    out, lse = (
        torch.empty(tokens, heads, dim, dtype=torch.float32),
        torch.empty(tokens, heads, dtype=torch.float32),
    )
    sink = None if sinks is None else sinks.data_ptr()
    into = out.data_ptr(), lse.data_ptr()
    sizes = parts, tokens * heads, heads, dim, torch.get_num_threads()
    run("merge_partials", outs.data_ptr(), lses.data_ptr(), sink, *into, DTYPES[out.dtype], *sizes)
    return out, lse
