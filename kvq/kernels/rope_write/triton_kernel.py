"""Device code of `rope_write`: norm, RoPE and storage for some of a token's heads."""

import triton
import triton.language as tl

from kvq.kernels.gpu.encode import finite_rows, write_token
from kvq.kernels.gpu.launch import opened
from kvq.kernels.gpu.rows import INTERPRETED, rounded
from kvq.kernels.rope_write.reference import Pairs

_HALVES, _TWICE = tl.constexpr(Pairs.HALVES.value), tl.constexpr(Pairs.NEIGHBOURS_TWICE.value)


@triton.jit
def _some_heads(
    heads_ptr, bias_ptr, norm, start, head, inside, col,
    HEADS: tl.constexpr, DIM: tl.constexpr, BIAS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return heads, fp32 [heads, columns], with bias and norm; `start`: elements before the first."""
    at = head[:, None] * DIM + col[None, :]
    mask = inside[:, None] & (col < DIM)[None, :]
    x = tl.load(heads_ptr + start + at, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        x = rounded(x + tl.load(bias_ptr + start + at, mask=mask, other=0.0).to(tl.float32), DTYPE)
    if norm is not None:
        if norm.together:
            weight = tl.load(norm.weight + at, mask=mask, other=0.0).to(tl.float32)
            mean = tl.sum(tl.sum(x * x, axis=1), axis=0) / (HEADS * DIM)
            x = rounded(x * tl.rsqrt(mean + norm.eps) * weight, DTYPE)
        else:
            weight = tl.load(norm.weight + col, mask=col < DIM, other=0.0).to(tl.float32)[None, :]
            x = rounded(x * tl.rsqrt(tl.sum(x * x, axis=1) / DIM + norm.eps)[:, None] * weight, DTYPE)
    return x


@triton.jit
def _turned(x, cos_ptr, sin_ptr, col, ROTARY: tl.constexpr, PAIRS: tl.constexpr, DTYPE: tl.constexpr):
    """Apply RoPE to the first ROTARY elements of each head, fp32 [heads, columns]; see Pairs."""
    if ROTARY > 0:
        HALF: tl.constexpr = ROTARY // 2
        if PAIRS == _HALVES:
            is_first = col < HALF
            partner = tl.where(is_first, col + HALF, col - HALF)
            pair = tl.where(is_first, col, col - HALF)
        else:
            is_first = col % 2 == 0
            partner = col ^ 1
            pair = col - col % 2 if PAIRS == _TWICE else col // 2
        inside = col < ROTARY
        cos = tl.load(cos_ptr + pair, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + pair, mask=inside, other=0.0).to(tl.float32)
        sin = tl.where(is_first, -sin, sin)
        partner = tl.where(inside, partner, col)
        other = tl.gather(x, tl.broadcast_to(partner[None, :], x.shape), axis=1)
        turned = rounded(x * cos[None, :] + other * sin[None, :], DTYPE)
        x = tl.where(inside[None, :], turned, x)
    return x


@triton.jit
def _stored(
    heads_ptr, bias_ptr, cos_ptr, sin_ptr, slot_ptr, bad_ptr, norm, center_ptr, rows, start, first,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, BIAS: tl.constexpr,
    ROTARY: tl.constexpr, PAIRS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Store some of a token's K or V heads in the token's slot."""
    slot = tl.load(slot_ptr).to(tl.int64)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    head, col = first + tl.arange(0, TILE), tl.arange(0, rows.pad)
    inside = head < HEADS
    x = _some_heads(heads_ptr, bias_ptr, norm, start, head, inside, col, HEADS, rows.dim, BIAS, DTYPE)
    x = _turned(x, cos_ptr, sin_ptr, col, ROTARY, PAIRS, DTYPE)
    if center_ptr is not None:
        at = head[:, None] * rows.dim + col[None, :]
        mask = inside[:, None] & (col < rows.dim)[None, :]
        x = rounded(x - tl.load(center_ptr + at, mask=mask, other=0.0), DTYPE)
    x, is_bad = finite_rows(x)
    write_token(x, rows, block, offset, head, col, inside, TILE)
    tl.store(bad_ptr, is_bad.to(tl.int8), mask=is_bad > 0)  # other programs of the token may set it, too


@triton.jit
def _turn_queries(
    heads_ptr, bias_ptr, cos_ptr, sin_ptr, norm, first,
    DIM: tl.constexpr, PAD: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, BIAS: tl.constexpr,
    ROTARY: tl.constexpr, PAIRS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Apply norm and RoPE to some of a token's query heads, in place."""
    head, col = first + tl.arange(0, TILE), tl.arange(0, PAD)
    inside = head < HEADS
    x = _some_heads(heads_ptr, bias_ptr, norm, 0, head, inside, col, HEADS, DIM, BIAS, DTYPE)
    x = _turned(x, cos_ptr, sin_ptr, col, ROTARY, PAIRS, DTYPE)
    mask = inside[:, None] & (col < DIM)[None, :]
    tl.store(heads_ptr + head[:, None] * DIM + col[None, :], x.to(DTYPE), mask=mask)


@triton.jit
def rope_write_kernel(
    heads_ptr, bias_ptr, cos_ptr, sin_ptr, slots_ptr, bad_ptr, heads_row, cos_row, sin_row,
    k, v, q_norm, k_norm, k_center, v_center,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, Q_TILE: tl.constexpr, K_TILE: tl.constexpr,
    V_TILE: tl.constexpr, K_TILES: tl.constexpr, V_TILES: tl.constexpr, BIAS: tl.constexpr,
    ROTARY: tl.constexpr, PAIRS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Apply norm and RoPE, and store K and V. Grid: (tokens, tiles of heads: of K, then V, then queries)."""
    if INTERPRETED:
        k, v, q_norm, k_norm = opened(k), opened(v), opened(q_norm), opened(k_norm)
    DTYPE: tl.constexpr = heads_ptr.dtype.element_ty
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, cos, sin = heads_ptr + token * heads_row, cos_ptr + token * cos_row, sin_ptr + token * sin_row
    slot, bad = slots_ptr + token, bad_ptr + token
    if tile < K_TILES:
        _stored(
            row, bias_ptr, cos, sin, slot, bad, k_norm, k_center, k, Q_HEADS * k.dim, tile * K_TILE,
            BLOCK_SIZE, KV_HEADS, K_TILE, BIAS, ROTARY, PAIRS, DTYPE,
        )  # fmt: skip
    elif tile < K_TILES + V_TILES:
        start, first = (Q_HEADS + KV_HEADS) * k.dim, (tile - K_TILES) * V_TILE
        _stored(
            row, bias_ptr, cos, sin, slot, bad, None, v_center, v, start, first,
            BLOCK_SIZE, KV_HEADS, V_TILE, BIAS, 0, PAIRS, DTYPE,
        )  # fmt: skip
    else:
        first = (tile - K_TILES - V_TILES) * Q_TILE
        _turn_queries(
            row, bias_ptr, cos, sin, q_norm, first,
            k.dim, k.pad, Q_HEADS, Q_TILE, BIAS, ROTARY, PAIRS, DTYPE,
        )  # fmt: skip
