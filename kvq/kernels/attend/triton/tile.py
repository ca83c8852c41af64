"""One tile of keys in Triton attention: row offsets, scores, and contribution to the output."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kvq.kernels.attend.triton.means import mean_scores
from kvq.kernels.attend.triton.results import LOG2_E
from kvq.kernels.attend.triton.scales import row_scales, scaled
from kvq.kernels.attend.triton.values import add_byte_values, add_packed_values
from kvq.kernels.attend.triton.words import (
    added_dot,
    byte_scores,
    dot,
    folded,
    packed_scores,
    rounded_queries,
    rounded_scores,
)
from kvq.kernels.gpu.rows import FLOAT, INT4, rotate
from kvq.kernels.gpu.stored import mean_rows, stored_rows


class _Tile(NamedTuple):
    """K or V rows of one tile: a pointer, the rows' offsets [keys] from it, and a mask of existing keys."""

    codes: Any
    codes_at: Any
    scales: Any
    scales_at: Any
    means_at: Any  # offsets of the keys' blocks from `means`: [keys], or [1] if all are in one block
    slot: Any  # [keys], within their blocks
    kv_head: Any
    inside: Any  # bool [keys]


@triton.jit
def rows_at(
    start, block, first, slot, stride, STEP: tl.constexpr, PER: tl.constexpr, IN_ONE_BLOCK: tl.constexpr
):
    """Return a pointer to a tile's rows and their offsets [keys]; PER: number of adjacent tokens per element.

    IN_ONE_BLOCK: `block` is one number and `slot` counts from token `first`; otherwise both are per key.
    """
    if IN_ONE_BLOCK:
        start += block * stride + first // PER * STEP
        at = slot // PER * STEP
    else:
        at = block * stride + slot // PER * STEP
    return start, at


@triton.jit
def tile_of(rows, codes, scales, means_at, block, first, slot, kv_head, inside, IN_ONE_BLOCK: tl.constexpr):
    """Return a tile of K or V in the given blocks; `codes`, `scales`: pointers for the KV head."""
    PER: tl.constexpr = 1 + rows.read.paired
    codes, codes_at = rows_at(
        codes, block, first, slot, rows.code_strides.block, rows.code_strides.slot, 1, IN_ONE_BLOCK
    )
    scales, scales_at = rows_at(
        scales, block, first, slot, rows.scale_strides.block, rows.scale_strides.slot, PER, IN_ONE_BLOCK
    )
    return _Tile(codes, codes_at, scales, scales_at, means_at, slot, kv_head, inside)


@triton.jit
def dense_rows(rows, tile, col):
    """Return a tile's rows, not read as words, as [keys, columns] in the dtype of products."""
    if rows.kind == FLOAT:
        mask = tile.inside[:, None] & (col < rows.dim)[None, :]
        x = tl.load(tile.codes + (tile.codes_at[:, None] + col[None, :]), mask=mask, other=0)
    else:
        x = stored_rows(
            rows, tile.codes, tile.scales, tile.codes_at, tile.scales_at, tile.kv_head, tile.inside, col
        )
    return x.to(rows.read.compute)


@triton.jit
def _with_means(x, rows, tile, col):
    """Return rows [keys, columns] plus the means of their blocks."""
    if tile.means_at.shape[0] == 1:
        mean = mean_rows(rows.means, tile.means_at, tl.arange(0, 1) == 0, col, rows.dim, rows.mean_group)
    else:
        mean = mean_rows(rows.means, tile.means_at, tile.inside, col, rows.dim, rows.mean_group)
    return (x.to(tl.float32) + mean).to(x.dtype)


@triton.jit
def tile_scores(q, runs, sums, k, tile, SPREAD: tl.constexpr, WINDOW: tl.constexpr, MEAN_GROUP: tl.constexpr):
    """Return q . k for one tile, fp32 [rows, keys], without the factors shared by all keys. `runs`, `sums`:
    queries in the form for words of codes. MEAN_GROUP: 0 if means are added elsewhere."""
    if k.read.words and k.kind >= INT4:
        before = tl.zeros((q.shape[0], tile.inside.shape[0]), tl.float32)
        if MEAN_GROUP > 0:
            before = mean_scores(runs, sums[1:], k, tile.means_at, tile.inside.shape[0], MEAN_GROUP)
        scores = packed_scores(
            runs, sums, before, tile.codes, tile.scales, tile.codes_at, tile.scales_at, tile.inside, k.kind,
            k.dim, k.group, k.read.run, k.read.width, k.read.pairs, k.read.compute, SPREAD,
        )  # fmt: skip
    elif k.read.words or k.read.rounded:
        if k.read.rounded:
            scores = rounded_scores(q, k, tile)
        else:
            scores = byte_scores(runs, k, tile)
        if k.static is None:
            scores = scores * row_scales(k, tile, SPREAD, WINDOW).to(tl.float32)[None, :]
    else:
        x = dense_rows(k, tile, tl.arange(0, k.pad))
        if MEAN_GROUP > 0:
            x = _with_means(x, k, tile, tl.arange(0, k.pad))
        scores = dot(q, tl.trans(x))
    return scores


@triton.jit
def with_values(
    outs, p, decay, v, tile, SPREAD: tl.constexpr, WINDOW: tl.constexpr, MEAN_GROUP: tl.constexpr
):
    """Return the parts of the output after adding one tile. MEAN_GROUP: 0 if means are added elsewhere."""
    if v.read.words and v.kind >= INT4:
        new = add_packed_values(
            outs, p, decay, tile.codes, tile.scales, tile.codes_at, tile.scales_at, tile.inside, v.kind,
            v.dim, v.group, v.read.run, v.read.width, v.read.pairs, v.read.compute, SPREAD, v.means,
            tile.means_at, MEAN_GROUP,
        )  # fmt: skip
    elif v.read.words:
        weights = p.to(v.read.compute)
        if v.static is None:
            weights = scaled(weights, row_scales(v, tile, SPREAD, WINDOW))
        new = add_byte_values(outs, weights, decay, v, tile)
    else:
        x = dense_rows(v, tile, tl.arange(0, v.pad))
        if MEAN_GROUP > 0:
            x = _with_means(x, v, tile, tl.arange(0, v.pad))
        new = (added_dot(p.to(v.read.compute), x, outs[0] * decay[:, None]),)
    return new


@triton.jit
def _capped_and_masked(scores, softcap, key, last, before, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr):
    """Return scores with -inf for hidden keys; capped scores are converted to exponents of two.

    A row sees keys up to `last` and, with a window, only keys after `before`.
    """
    if SOFTCAP:
        grown = tl.exp2(scores * (2.0 / softcap * LOG2_E))
        scores = (softcap * LOG2_E) * (1.0 - 2.0 / (grown + 1.0))
    visible = key[None, :] <= last[:, None]
    if WINDOW:
        visible = visible & (key[None, :] > before[:, None])
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def weighed(
    scores, row_scale, added, top, key, last, before, softcap,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, FOLDED: tl.constexpr, ENLARGED: tl.constexpr,
    ADDED: tl.constexpr,
):  # fmt: skip
    """Return one tile's weights and their sums, the factor for earlier tiles, and the new maxima.

    `row_scale`: factor of the scores, which also converts uncapped scores to exponents of two; `added`:
    number added to all scaled scores of a row, if ADDED. ENLARGED: number added to the exponents of weights.
    """
    if SOFTCAP:
        scores = scores * row_scale[:, None]
        if ADDED:
            scores += added[:, None]
    scores = _capped_and_masked(scores, softcap, key, last, before, SOFTCAP, WINDOW)
    highest = tl.max(scores, axis=1)
    if not SOFTCAP:  # scaled where the maximum is subtracted: a product and a sum are one instruction
        highest = highest * row_scale
        scores = scores * row_scale[:, None]
        if ADDED:
            highest += added
    higher = tl.maximum(top, highest)
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    taken = safe - ENLARGED
    if ADDED and not SOFTCAP:
        taken -= added
    p = tl.exp2(scores - taken[:, None])
    decay = tl.exp2(top - safe)
    return p, folded(p, FOLDED), decay, higher


@triton.jit
def power_of_two(top):
    """Return the smallest power of two that is >= `top`, and its inverse, both clamped to fp32 range."""
    biased = (top.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23  # D391: log2 of every row takes thirty
    bits = tl.minimum(tl.maximum(biased, 1), 253) << 23
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def read_queries(q_ptr, at, mask, k, ROWS: tl.constexpr):
    """Return queries [ROWS, k.pad] in the dtype of products or rounded to K's codes, and rows' score factors.

    fp16 can't represent all bf16 numbers, or sums of large ones, so rows are divided by a power of two.
    """
    COMPUTE: tl.constexpr = k.read.compute
    x = tl.load(q_ptr + at, mask=mask, other=0.0)
    unit = tl.full((ROWS,), 1.0, tl.float32)
    if (k.rotated > 1) or k.read.rounded or COMPUTE == tl.float16:
        y = x.to(tl.float32)
        if k.rotated > 1:
            y = rotate(y, ROWS, k.pad, k.rotated)
        if k.read.rounded:
            x, unit = rounded_queries(y, k.kind)
        else:
            if COMPUTE == tl.float16:
                unit, inverse = power_of_two(tl.max(tl.abs(y), axis=1))
                y = y * inverse[:, None]
            x = y.to(COMPUTE)
    else:
        x = x.to(COMPUTE)
    return x, unit
