"""`write_kv` in C++ for CPUs."""

import torch
from torch import Tensor

from kvq.errors import ConfigError
from kvq.kernels.native.abi import check_shape, dense_of, layer_of
from kvq.kernels.native.library import run
from kvq.kernels.paged import PagedKV


def write_kv(k: Tensor, v: Tensor, kv: PagedKV, slots: Tensor) -> Tensor:
    """Do what the reference does, byte for byte; see reference.py.

    Raises:
        IndexError: a slot lies outside the pool; nothing was written.
        ConfigError: shapes don't fit the blocks, or a format needs complete blocks.
    """
    if kv.formats.need_whole_blocks:
        raise ConfigError(
            f"K {kv.formats.k.name}, V {kv.formats.v.name} are stored a block at a time, by `seal`; write "
            f"tokens to its staging area"
        )
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
    into = bad.data_ptr(), torch.get_num_threads()
    run("write_kv", layer_of(kv), from_k, from_v, slots.data_ptr(), tokens, *into)
    return bad
