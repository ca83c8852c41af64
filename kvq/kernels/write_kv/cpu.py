"""`write_kv` in C++ for CPUs."""

import ctypes

import torch
from torch import Tensor

from kvq.errors import ConfigError
from kvq.kernels.native.library import check, loaded
from kvq.kernels.native.structs import check_shape, dense_of, layer_of
from kvq.kernels.paged import PagedKV


def write_kv(k: Tensor, v: Tensor, kv: PagedKV, slots: Tensor) -> Tensor:
    """Do what the reference does, with the same bytes; see there.

    Raises:
        IndexError: a slot lies outside the pool; nothing was written.
        ConfigError: shapes that don't fit the blocks.
    """
    tokens, heads = k.shape[0], kv.k.codes.shape[1]
    check_shape("k", k, heads, kv.formats.k_head_dim)
    check_shape("v", v, heads, kv.formats.v_head_dim)
    if v.shape[0] != tokens or slots.shape != (tokens,):
        raise ConfigError(
            f"k, v and slots must be as many tokens, got {tokens}, {v.shape[0]}, {slots.numel()}"
        )
    from_k, k = dense_of(k)
    from_v, v = dense_of(v)
    slots = slots.long().contiguous()
    bad = torch.empty(tokens, dtype=torch.bool)
    check(
        loaded().write_kv(
            ctypes.byref(layer_of(kv)),
            ctypes.byref(from_k),
            ctypes.byref(from_v),
            ctypes.c_void_p(slots.data_ptr()),
            ctypes.c_int64(tokens),
            ctypes.c_void_p(bad.data_ptr()),
            torch.get_num_threads(),
        )
    )
    return bad
