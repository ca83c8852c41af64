"""`write_kv` in C++ for CPUs."""

import ctypes

import torch
from torch import Tensor

from kvq.kernels.native.library import check, loaded
from kvq.kernels.native.structs import dense_of, layer_of
from kvq.kernels.paged import PagedKV


def write_kv(k: Tensor, v: Tensor, kv: PagedKV, slots: Tensor) -> Tensor:
    """Do what the reference does, with the same bytes; see there.

    Raises:
        IndexError: a slot lies outside the pool; nothing was written.
    """
    tokens = k.shape[0]
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
