"""Unquantized rows in dense tensors, as kernels over blocks take them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvq.formats import LayerFormats
from kvq.kernels.paged import PagedKV, PagedRows

Rows = tuple[Tensor, Tensor]  # K and V
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def plain_blocks(k: Tensor, v: Tensor, block_size: int) -> PagedKV:
    """Rows as blocks: [blocks, kv_heads, block_size, dim], of one dtype: fp32, bf16 or fp16."""
    formats = LayerFormats.plain(_NAMES[k.dtype], k.shape[3], v.shape[3])
    rows = [PagedRows(codes=x, scales=None, static_scale=None) for x in (k, v)]
    return PagedKV(k=rows[0], v=rows[1], formats=formats, block_size=block_size)


def as_tokens(recent: Rows) -> PagedKV:
    """Dense rows [sequences, kv_heads, some, dim] as blocks of one token each."""
    sequences, heads, some, _ = recent[0].shape
    rows = []
    for x in recent:
        apart = x.stride(0) // x.stride(2)
        assert apart == recent[0].stride(0) // recent[0].stride(2), "K and V lie alike"
        size = ((sequences - 1) * apart + some, heads, 1, x.shape[3])
        rows.append(x.as_strided(size, (x.stride(2), x.stride(1), x.stride(2), 1)))
    return plain_blocks(rows[0], rows[1], 1)


def tables_of_tokens(recent: Rows, context_lens: Sequence[int]) -> Tensor:
    """int32 [sequences, tokens of the longest]: where positions' rows lie in `as_tokens`; 0: nowhere."""
    some, apart = recent[0].shape[2], recent[0].stride(0) // recent[0].stride(2)
    position = torch.arange(max(context_lens), dtype=torch.int32)
    ends = torch.tensor(context_lens, dtype=torch.int32)[:, None]
    rows = position - ends + some + torch.arange(len(context_lens), dtype=torch.int32)[:, None] * apart
    held = (position >= ends - some) & (position < ends)
    return torch.where(held, rows, 0).int().to(recent[0].device)
