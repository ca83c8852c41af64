"""Attention over two segments: older tokens in quantized blocks, recent ones as they came."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kvq.cache.kv_cache import KVCache
from kvq.formats import LayerFormats, parse_format
from kvq.kernels import Device, KernelSpec, PagedKV, PagedRows, SequenceBatch, select

Segment = tuple[Tensor, Tensor]  # K and V
_LEAST_BLOCK = 256  # tokens
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def attend_both(
    cache: KVCache,
    layer: int,
    q: Tensor,
    batch: SequenceBatch,
    recent: Segment,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """What `KVCache.attend` does, but with `recent` in place of the last tokens in the blocks.

    `recent`: K and V of every sequence's last tokens, the step's own among them,
    [sequences, kv_heads, some, dim]; of shorter sequences the last rows count. Both parts are
    merged by their log-sum-exp, exactly. Returns [tokens, q_heads, v_head_dim] in q's dtype.
    """
    some = recent[0].shape[2]
    kv, tables = _as_blocks(recent) if min(batch.context_lens) >= some else _as_tokens(recent, batch)
    attend, merge = _kernels(kv.formats, q.shape[1], recent[0].shape[1], q.device)
    own = SequenceBatch(
        query_lens=batch.query_lens,
        context_lens=tuple(min(some, context) for context in batch.context_lens),
        tables=tables,
        slots=batch.slots,
    )
    query = q.float()
    parts = [attend(query, kv, own, scale=scale, window=window, softcap=softcap)]
    if max(batch.context_lens) > some:
        parts.append(
            cache.attend(
                layer,
                query,
                batch,
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=None,
                skip_last=some,
            )
        )
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    out: Tensor = merge(outs, lses, sinks)[0]
    return out.to(q.dtype)


@lru_cache(maxsize=64)
def _kernels(
    formats: LayerFormats, q_heads: int, kv_heads: int, device: torch.device
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`attend` for unquantized rows, in blocks of any size, and `merge_partials`."""
    spec = KernelSpec(formats=formats, q_heads=q_heads, kv_heads=kv_heads, block_size=1)
    where = Device.of(device)
    return select("attend", spec, where).run, select("merge_partials", spec, where).run


@lru_cache(maxsize=64)
def _formats(k: torch.dtype, v: torch.dtype, k_head_dim: int, v_head_dim: int) -> LayerFormats:
    return LayerFormats(
        k=parse_format(_NAMES[k], k_head_dim),
        v=parse_format(_NAMES[v], v_head_dim),
        k_head_dim=k_head_dim,
        v_head_dim=v_head_dim,
    )


def _as_blocks(recent: Segment) -> tuple[PagedKV, Tensor]:
    """Dense rows [sequences, kv_heads, some, dim] as one unquantized block per sequence, and tables.

    The block is said to be larger than it is: no key lies past the rows, and kernels that are
    compiled per block size see few sizes.
    """
    sequences, _, some, _ = recent[0].shape
    tables = torch.arange(sequences, dtype=torch.int32, device=recent[0].device)[:, None]
    return _paged(recent, max(_LEAST_BLOCK, 1 << (some - 1).bit_length())), tables


def _as_tokens(recent: Segment, batch: SequenceBatch) -> tuple[PagedKV, Tensor]:
    """The same as blocks of one token, so that every sequence may begin at a row of its own."""
    sequences, heads, some, _ = recent[0].shape
    step, head = recent[0].stride(2), recent[0].stride(1)
    per_head, per_sequence = head // step, recent[0].stride(0) // step  # in rows
    rows = []
    for x in recent:
        assert [n // x.stride(2) for n in x.stride()[:2]] == [per_sequence, per_head], "K and V lie alike"
        count = (sequences - 1) * per_sequence + some
        size, stride = (count, heads, 1, x.shape[3]), (x.stride(2), x.stride(1), x.stride(2), 1)
        rows.append(x.as_strided(size, stride))
    tables = torch.zeros(sequences, some, dtype=torch.int32)
    for i, context in enumerate(batch.context_lens):
        held = min(some, context)
        first = i * per_sequence + some - held
        tables[i, :held] = torch.arange(first, first + held, dtype=torch.int32)
    return _paged((rows[0], rows[1]), 1), tables.to(recent[0].device)


def _paged(codes: Segment, block_size: int) -> PagedKV:
    k, v = codes
    return PagedKV(
        k=PagedRows(codes=k, scales=None, static_scale=None),
        v=PagedRows(codes=v, scales=None, static_scale=None),
        formats=_formats(k.dtype, v.dtype, k.shape[3], v.shape[3]),
        block_size=block_size,
    )
