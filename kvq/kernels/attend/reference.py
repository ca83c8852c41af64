"""Reference `attend`: attention of new tokens over blocks, for mixed prefill and decode batches."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from kvq.formats import Code, KVFormat
from kvq.kernels.attend.options import AttentionOptions
from kvq.kernels.codec import e4m3, rotate
from kvq.kernels.gather_dense.reference import gather_dense
from kvq.kernels.merge_partials.reference import merge_partials
from kvq.kernels.paged import PagedKV, SequenceBatch

# Keys are processed in tiles that start at multiples of this position, and rows at least a few at a
# time. Every matrix product then has the same inner shape however a context was split into steps,
# so the same tokens yield the same bits: chunk sizes and other sequences don't flip a single KV code.
_KEY_TILE = 256  # D84: the same bits, however tokens are split into steps
_MIN_ROWS = 4  # BLAS takes another path for a single row
_ROW_TILE = 256  # query rows in one tile: bounds memory, and skips keys past the tile's last row
_LARGEST = {Code.FP8: e4m3.LARGEST, Code.INT8: 127.0}  # largest codes to which queries are rounded
_LEAST = 1e-30  # minimum value that is used for a row's largest element


def attend(  # D83: decode is an extend of one token
    q: Tensor, kv: PagedKV, batch: SequenceBatch, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Attend causally from every sequence's new tokens over its blocks.

    The new tokens' K and V must already be written. `q`: [tokens, q_heads, k_head_dim] in packed
    order; query head h reads KV head h * kv_heads // q_heads.

    Returns out [tokens, q_heads, v_head_dim] in q's dtype and lse fp32 [tokens, q_heads], natural log, sinks
    included; (0, -inf) if a query sees no key.
    """
    fmt = kv.formats
    query = rotate(q) if fmt.k.rotated else q.float()

    def rows(table: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
        k, v = (x[0] for x in gather_dense(kv, table, start, end))
        return k, v

    out, lse = attend_rows(query, rows, fmt.v_head_dim, batch, options)
    if fmt.v.rotated:
        out = rotate(out)
    return out.to(q.dtype), lse


def attend_rows(
    query: Tensor,
    rows_of: Callable[[Tensor, int, int], tuple[Tensor, Tensor]],
    v_dim: int,
    batch: SequenceBatch,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor]:
    """Return `attend`'s results for fp32 rows from any source: `rows_of` returns K and V, [kv_heads, keys,
    dim], at positions [start, end) of a table. `query`: fp32 [tokens, q_heads, dim]."""
    tokens, q_heads, _ = query.shape
    out = torch.zeros(tokens, q_heads, v_dim, device=query.device, dtype=torch.float32)
    lse = torch.full((tokens, q_heads), float("-inf"), device=query.device, dtype=torch.float32)
    at = 0
    for i, (new, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        own = slice(at, at + new)
        at += new
        if new:
            start = context - new
            oldest, end = options.oldest(start), options.end(context - 1)
            if end <= oldest:
                continue
            k, v = rows_of(batch.tables[i : i + 1], oldest, end)
            out[own], lse[own] = attend_keys(query[own] * options.scale, k, v, start, oldest, options)
    if options.sinks is not None:
        out, lse = merge_partials(out[None], lse[None], options.sinks)
    return out, lse


def attend_keys(
    q: Tensor, k: Tensor, v: Tensor, start: int, oldest: int, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Attend for one sequence; return out [new, q_heads, dim] and lse. `q`: fp32 [new, q_heads, dim], scaled,
    starting at position `start`; `k` and `v`: [kv_heads, keys, dim], starting at position `oldest`."""
    keys = k.shape[1]
    front, back = oldest % _KEY_TILE, -(oldest + keys) % _KEY_TILE
    k, v = (functional.pad(x, (0, 0, front, back)) for x in (k, v))  # whole tiles of keys
    outs, lses = [], []
    for row in range(0, q.shape[0], _ROW_TILE):
        tile = q[row : row + _ROW_TILE]
        out, lse = _attend_tile(tile, k, v, start + row, range(oldest, oldest + keys), options)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def _attend_tile(
    q: Tensor, k: Tensor, v: Tensor, first: int, keys: range, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Attend from a tile of query rows, the first at position `first`, over key tiles with a running softmax.

    `keys`: positions of the keys in `k` and `v`, excluding padding.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    rows, kv_heads = q.shape[0], k.shape[0]
    q = functional.pad(q, (0, 0, 0, 0, 0, max(0, _MIN_ROWS - rows)))
    padded = q.shape[0]
    # [padded, kv_heads, group, dim] -> [kv_heads, group * padded, dim]
    folded = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
    position = torch.arange(first, first + padded, device=q.device)[:, None]
    top = torch.full((*folded.shape[:2], 1), float("-inf"), device=q.device, dtype=torch.float32)
    total = torch.zeros_like(top)
    out = torch.zeros(*folded.shape[:2], v.shape[2], device=q.device, dtype=torch.float32)
    origin = keys.start // _KEY_TILE * _KEY_TILE
    begin = max(0, options.oldest(first) - origin) // _KEY_TILE * _KEY_TILE
    for at in range(begin, min(first + rows, keys.stop) - origin, _KEY_TILE):
        tile = slice(at, at + _KEY_TILE)
        scores = options.capped(folded @ k[:, tile].transpose(1, 2))
        key = torch.arange(origin + at, origin + at + _KEY_TILE, device=q.device)
        hidden = options.hides(position, key) | (key < keys.start) | (key >= keys.stop)  # [padded, keys]
        scores = scores.unflatten(1, (-1, padded)).masked_fill_(hidden, float("-inf")).flatten(1, 2)
        higher = torch.maximum(top, scores.amax(dim=-1, keepdim=True))
        finite = torch.where(torch.isneginf(higher), 0.0, higher)  # nothing visible yet: weights are 0
        weights = torch.exp(scores - finite)
        decay = torch.exp(top - finite)
        total = total * decay + weights.sum(dim=-1, keepdim=True)
        out = out * decay + weights @ v[:, tile]
        top = higher
    unfold = (-1, padded)
    out = torch.where(total == 0, 0.0, out / total)
    merged = out.unflatten(1, unfold).permute(2, 0, 1, 3).flatten(1, 2)
    lse = (top + total.log())[..., 0].unflatten(1, unfold).permute(2, 0, 1).flatten(1, 2)
    return merged[:rows], lse[:rows]


def limit_of(fmt: KVFormat) -> float | None:
    """Return the largest code of K, or None if K's codes can't be multiplied directly."""
    return None if fmt.is_per_channel else _LARGEST.get(fmt.code)


def rounded_queries(q: Tensor, fmt: KVFormat) -> Tensor:
    """Return q, fp32 [..., dim], rounded to codes of `fmt` with one scale per row, or unchanged if K's codes
    can't be multiplied directly.

    If the format rotates, q is rotated, rounded and rotated back.
    """
    limit = limit_of(fmt)
    if limit is None:
        return q.float()
    y = rotate(q.float()) if fmt.rotated else q.float()
    top = y.abs().amax(dim=-1, keepdim=True).clamp(min=_LEAST)
    codes = y * (limit / top)
    held = e4m3.decode(e4m3.encode(codes)) if fmt.code is Code.FP8 else codes.round()
    held = held * (top / limit)
    return rotate(held) if fmt.rotated else held
