"""Attention over two segments: older tokens in quantized blocks, recent ones as they came."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kvq.cache.kv_cache import KVCache
from kvq.formats import LayerFormats, parse_format
from kvq.kernels import AttentionOptions, Device, KernelSpec, PagedKV, PagedRows, SequenceBatch, select

Segment = tuple[Tensor, Tensor]  # K and V
_LEAST_BLOCK = 256  # tokens
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def attend_both(
    cache: KVCache,
    layer: int,
    q: Tensor,
    batch: SequenceBatch,
    recent: Segment,
    options: AttentionOptions,
) -> Tensor:
    """What `KVCache.attend` does, but with `recent` in place of the last tokens in the blocks.

    `recent`: K and V of every sequence's last tokens, the step's own among them,
    [sequences, kv_heads, some, dim]; of shorter sequences the last rows count. Both parts are
    merged by their log-sum-exp, exactly. Returns [tokens, q_heads, v_head_dim] in q's dtype.
    """
    some = recent[0].shape[2]
    whole = min(batch.context_lens) >= some
    kv = _as_blocks(recent) if whole else _as_tokens(recent)
    own = _own(batch, recent, whole)
    attend, merge = _kernels(kv.formats, q.shape[1], recent[0].shape[1], q.device)
    # On a CPU both parts stay fp32 until they are merged; GPUs multiply in 16 bits.
    query = q.float() if q.device.type == "cpu" else q
    without_sinks = options.without_sinks()
    parts = [attend(query, kv, own, without_sinks)]
    if max(batch.context_lens) > some:
        parts.append(cache.attend(layer, query, batch, without_sinks, skip_last=some))
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    out: Tensor = merge(outs, lses, options.sinks)[0]
    return out.to(q.dtype)


def _own(batch: SequenceBatch, recent: Segment, whole: bool) -> SequenceBatch:
    """The step as the recent rows see it: one for all layers that lie alike, so kernels plan once."""
    sequences, _, some, _ = recent[0].shape
    apart = 0 if whole else recent[0].stride(0) // recent[0].stride(2)  # rows from one sequence to the next
    name = (_own, some, apart)
    if name not in batch.kept:
        tables = torch.arange(sequences, dtype=torch.int32)[:, None]
        if not whole:
            tables = torch.zeros(sequences, some, dtype=torch.int32)
            for i, context in enumerate(batch.context_lens):
                held = min(some, context)
                first = i * apart + some - held
                tables[i, :held] = torch.arange(first, first + held, dtype=torch.int32)
        batch.kept[name] = SequenceBatch(
            query_lens=batch.query_lens,
            context_lens=tuple(min(some, context) for context in batch.context_lens),
            tables=tables.to(recent[0].device),
            slots=batch.slots,
        )
    own: SequenceBatch = batch.kept[name]
    return own


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


def _as_blocks(recent: Segment) -> PagedKV:
    """Dense rows [sequences, kv_heads, some, dim] as one unquantized block per sequence.

    The block is said to be larger than it is: no key lies past the rows, and kernels that are
    compiled per block size see few sizes.
    """
    return _paged(recent, max(_LEAST_BLOCK, 1 << (recent[0].shape[2] - 1).bit_length()))


def _as_tokens(recent: Segment) -> PagedKV:
    """The same as blocks of one token, so that every sequence may begin at a row of its own."""
    sequences, heads, some, _ = recent[0].shape
    rows = []
    for x in recent:
        apart = x.stride(0) // x.stride(2)
        assert apart == recent[0].stride(0) // recent[0].stride(2), "K and V lie alike"
        size = ((sequences - 1) * apart + some, heads, 1, x.shape[3])
        rows.append(x.as_strided(size, (x.stride(2), x.stride(1), x.stride(2), 1)))
    return _paged((rows[0], rows[1]), 1)


def _paged(codes: Segment, block_size: int) -> PagedKV:
    k, v = codes
    return PagedKV(
        k=PagedRows(codes=k, scales=None, static_scale=None),
        v=PagedRows(codes=v, scales=None, static_scale=None),
        formats=_formats(k.dtype, v.dtype, k.shape[3], v.shape[3]),
        block_size=block_size,
    )
