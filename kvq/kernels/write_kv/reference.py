"""Reference `write_kv`: quantize rows of new tokens and store them in their slots."""

import torch
from torch import Tensor

from kvq.formats import KVFormat
from kvq.kernels.codec import encode
from kvq.kernels.paged import PagedKV, PagedRows


def write_kv(k: Tensor, v: Tensor, kv: PagedKV, slots: Tensor) -> Tensor:  # D16
    """Quantize the K and V rows of new tokens once, and store them.

    `k`: [tokens, kv_heads, k_head_dim], `v`: [tokens, kv_heads, v_head_dim], any strides, after
    RoPE. `slots`: int64 [tokens], all different. Returns bool [tokens]: True where K or V contains a
    NaN or an infinity, which is stored as zero.
    """
    formats = kv.formats
    _scatter(k, kv.k, formats.k, formats.k_clip, slots, kv.block_size)
    _scatter(v, kv.v, formats.v, formats.v_clip, slots, kv.block_size)
    return ~(torch.isfinite(k).all(dim=-1).all(dim=-1) & torch.isfinite(v).all(dim=-1).all(dim=-1))


def _scatter(x: Tensor, rows: PagedRows, fmt: KVFormat, clip: float, slots: Tensor, block_size: int) -> None:
    static = None if rows.static_scale is None else rows.static_scale[:, None]
    codes, scales = encode(x, fmt, static, clip=clip)  # [tokens, kv_heads, row]
    block, offset = slots // block_size, slots % block_size
    rows.codes[block, :, offset] = codes
    if rows.scales is not None:
        assert scales is not None, f"{fmt.name} stores scales"
        rows.scales[block, :, offset] = scales
