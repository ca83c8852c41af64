"""Attention over two segments: older tokens in quantized blocks, recent ones as they came."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvq.cache.kv_cache import KVCache
from kvq.formats import LayerFormats, parse_format
from kvq.kernels import AttentionOptions, Device, KernelSpec, PagedKV, PagedRows, SequenceBatch, select

Segment = tuple[Tensor, Tensor]  # K and V
# Formats of rows as they came, `attend` for them in blocks of any size, and `merge_partials`
_Plan = tuple[LayerFormats, Callable[..., Any], Callable[..., Any]]
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
    formats, attend, merge = _plan(cache.layer(layer), q, recent)
    kv = _as_blocks(recent, formats) if whole else _as_tokens(recent, formats)
    own = _own(batch, recent, whole)
    # On a CPU both parts stay fp32 until they are merged; GPUs multiply in 16 bits.
    query = q.float() if q.device.type == "cpu" else q
    without_sinks = options.without_sinks()
    parts = [attend(query, kv, own, without_sinks)]
    if max(batch.context_lens) > some:
        parts.append(cache.attend(layer, query, batch, without_sinks, skip_last=some))
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    out: Tensor = merge(outs, lses, options.sinks)[0]
    return out.to(q.dtype)


def _plan(older: PagedKV, q: Tensor, recent: Segment) -> _Plan:
    """Found once for a layer's blocks and kept with them."""
    k, v = recent
    name = (_plan, k.dtype, v.dtype)
    if name not in older.kept:
        formats = LayerFormats(
            k=parse_format(_NAMES[k.dtype], k.shape[3]),
            v=parse_format(_NAMES[v.dtype], v.shape[3]),
            k_head_dim=k.shape[3],
            v_head_dim=v.shape[3],
        )
        spec = KernelSpec(formats=formats, q_heads=q.shape[1], kv_heads=k.shape[1], block_size=1)
        where = Device.of(q.device)
        kernels = [select(operation, spec, where).run for operation in ("attend", "merge_partials")]
        older.kept[name] = (formats, *kernels)
    plan: _Plan = older.kept[name]
    return plan


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


def _as_blocks(recent: Segment, formats: LayerFormats) -> PagedKV:
    """Dense rows [sequences, kv_heads, some, dim] as one unquantized block per sequence.

    The block is said to be larger than it is: no key lies past the rows, and kernels that are
    compiled per block size see few sizes.
    """
    return _paged(recent, formats, max(_LEAST_BLOCK, 1 << (recent[0].shape[2] - 1).bit_length()))


def _as_tokens(recent: Segment, formats: LayerFormats) -> PagedKV:
    """The same as blocks of one token, so that every sequence may begin at a row of its own."""
    sequences, heads, some, _ = recent[0].shape
    rows = []
    for x in recent:
        apart = x.stride(0) // x.stride(2)
        assert apart == recent[0].stride(0) // recent[0].stride(2), "K and V lie alike"
        size = ((sequences - 1) * apart + some, heads, 1, x.shape[3])
        rows.append(x.as_strided(size, (x.stride(2), x.stride(1), x.stride(2), 1)))
    return _paged((rows[0], rows[1]), formats, 1)


def _paged(codes: Segment, formats: LayerFormats, block_size: int) -> PagedKV:
    k, v = (PagedRows(codes=x, scales=None, static_scale=None) for x in codes)
    return PagedKV(k=k, v=v, formats=formats, block_size=block_size)
