"""Attention of many new tokens over a long context: K and V are decoded to 16-bit numbers, chunk by chunk,
for torch's flash attention.

In the fused kernel, every tile of query rows decodes the same codes again. Here, each code is decoded once,
into memory of at most `SCRATCH_BYTES`. The chunks' results are merged by their log-sum-exp, in fp32.

Source: Dao, "FlashAttention-2", 2023, section 3.1.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvq.formats import Code
from kvq.kernels.attend.options import AttentionOptions
from kvq.kernels.gather_dense.triton import gather_dense
from kvq.kernels.gpu import shapes
from kvq.kernels.merge_partials.triton import merge_into
from kvq.kernels.paged import PagedKV, SequenceBatch

SCRATCH_BYTES = 64 << 20  # K and V of one chunk; allocated once per step, for all layers
LEAST_ROWS = 1024  # query rows of one KV head that share a chunk's decoding
LEAST_PAIRS = 1 << 27  # query rows of all heads times keys
_MOST_DIM, _DIM_STEP = 256, 8  # head dimensions that flash attention takes
_TOO_WIDE = {torch.float16: (Code.FP32, Code.BF16), torch.bfloat16: (Code.FP32,)}

_Result = tuple[Tensor, Tensor]  # [new, q_heads, dim], and fp32 [new, q_heads]


def suits(q: Tensor, kv: PagedKV, options: AttentionOptions) -> bool:
    """Return True if a layer's attention can run as flash attention over rows in the queries' dtype.

    Flash attention does not support a softcap, different head dimensions of K and V, fp32 queries (except in
    the interpreter), codes whose values that dtype can't represent, or attention to only a part of the keys.
    Gathering isn't worthwhile for unquantized rows, which need no decoding (2,048 bf16 tokens over 32,768
    keys took an H200 2.38 ms fused and 3.52 ms gathered). Windows are checked per sequence.
    """
    dim, formats = kv.formats.k_head_dim, kv.formats
    wide = _TOO_WIDE.get(q.dtype, ())
    return (
        (q.device.type == "cpu" or q.dtype in _TOO_WIDE)
        and not any(fmt.code in wide for fmt in (formats.k, formats.v))
        and not (formats.k.code.is_float and formats.v.code.is_float)
        and (options.softcap is None and options.part is None)
        and (dim == formats.v_head_dim and dim <= _MOST_DIM and dim % _DIM_STEP == 0)
        and _has_flash(q.device)
    )


def pays(new: int, q_heads: int, share: int, keys: int) -> bool:
    """Return True if gathering is less work than decoding in every tile, by the counts in D138.

    `LEAST_ROWS` is 16 tiles of 64 rows. A sequence takes eight launches, plus six for every chunk after the
    first; flash attention takes 0.2 ms for `LEAST_PAIRS`, which is 25 us for each of the eight launches.
    """
    return new * share >= LEAST_ROWS and new * q_heads * keys >= LEAST_PAIRS


def chosen(batch: SequenceBatch, q_heads: int, share: int, window: int | None) -> list[int]:
    """Return the sequences worth gathering; none in a captured graph, where context lengths are unknown."""
    lens = [] if batch.is_captured else zip(batch.query_lens, batch.context_lens, strict=True)
    return [
        i
        for i, (new, context) in enumerate(lens)
        if (window is None or window >= context) and pays(new, q_heads, share, context)
    ]


def attend_gathered(  # D138: many new tokens: gathered rows and flash attention
    q: Tensor,
    kv: PagedKV,
    batch: SequenceBatch,
    options: AttentionOptions,
    sequences: Sequence[int],
    results: _Result,
) -> None:
    """Attend from `sequences` as `attend` does, and store their output rows in `results`."""
    scratch = _scratch(q, kv, batch)
    for i, rows in zip(sequences, batch.rows_of(sequences), strict=True):
        table, context = batch.tables[i : i + 1], batch.context_lens[i]
        parts = _parts(q[rows].contiguous(), kv, table, context, scratch, options.scale)
        for into, merged in zip(results, _merged(parts, options.sinks), strict=True):
            into[rows] = merged


def _parts(
    q: Tensor, kv: PagedKV, table: Tensor, context: int, scratch: tuple[Tensor, Tensor], scale: float
) -> Iterator[_Result]:
    """Yield the attention results for each chunk of keys in turn; all chunks use the same memory."""
    start = context - len(q)
    for begin, end in chunks(start, context, scratch[0].shape[2]):
        k, v = (x[:, :, : end - begin] for x in scratch)
        gather_dense(kv, table, begin, end, unrotate=True, out=(k, v))
        yield _over_chunk(q, k, v, begin - start, scale)


def chunks(start: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most `most` keys: first for keys before position `start`, then for the others."""
    for low, high in ((0, min(start, end)), (start, end)):
        count = -(-(high - low) // most)
        for i in range(count):
            yield low + (high - low) * i // count, low + (high - low) * (i + 1) // count


def _over_chunk(q: Tensor, k: Tensor, v: Tensor, before: int, scale: float) -> _Result:
    """Return the results of all query rows for one chunk of keys, [1, kv_heads, keys, dim]. `before`: number
    of query rows before the chunk's first key; they see none of its keys. If it is negative, the chunk
    precedes the new tokens and all rows see all keys."""
    keys = k.shape[2]
    if before < 0:
        return _flash(q, k, v, scale, is_causal=False)
    if before == 0 and keys == len(q):
        return _flash(q, k, v, scale, is_causal=True)
    out, lse = torch.empty_like(q), q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32)
    own, later = slice(before, before + keys), slice(before + keys, len(q))
    out[own], lse[own] = _flash(q[own], k, v, scale, is_causal=True)
    if before + keys < len(q):
        out[later], lse[later] = _flash(q[later], k, v, scale, is_causal=False)
    return out, lse


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, *, is_causal: bool) -> _Result:
    """Run torch's flash attention on q [new, q_heads, dim]; causal only if there are as many keys as rows.

    Both of torch's kernels accept fewer KV heads than query heads.
    """
    aten = torch.ops.aten
    on_cpu = q.device.type == "cpu"
    run: Any = (
        aten._scaled_dot_product_flash_attention_for_cpu
        if on_cpu
        else aten._scaled_dot_product_flash_attention
    )
    out, lse = run(q.transpose(0, 1)[None], k, v, 0.0, is_causal, scale=scale)[:2]
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def _merged(parts: Iterator[_Result], sinks: Tensor | None) -> _Result:
    """Merge all parts in fp32, each into the memory of the first before the next one is computed."""
    first = next(parts)
    outs, lses = (x.new_empty((2, *x.shape), dtype=torch.float32) for x in first)
    whole = outs[0], lses[0]
    outs[0], lses[0] = first
    for part in parts:
        outs[1], lses[1] = part
        merge_into(whole, outs, lses)
    if sinks is not None:
        merge_into(whole, outs[:1], lses[:1], sinks)
    return whole


def _scratch(q: Tensor, kv: PagedKV, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
    """Return buffers for a chunk's K and V, [1, kv_heads, keys, dim] each, shared by all layers."""
    heads, dim = kv.k.codes.shape[1], kv.formats.k_head_dim
    keys = SCRATCH_BYTES // (2 * heads * dim * q.element_size())
    name = _scratch, q.dtype, heads, keys, dim
    if name not in batch.kept:
        batch.kept[name] = tuple(q.new_empty(1, heads, keys, dim) for _ in range(2))
    room: tuple[Tensor, Tensor] = batch.kept[name]
    return room


def _has_flash(device: torch.device) -> bool:
    return device.type == "cpu" or (
        shapes.device_name(device).startswith("sm") and torch.backends.cuda.is_flash_attention_available()
    )
