"""The device code of `rope_write`: some heads of a token, normed, turned and stored."""

import triton
import triton.language as tl

from kvq.kernels.gpu.rows import rounded
from kvq.kernels.rope_write.heads import Pairs
from kvq.kernels.write_kv.triton import finite_rows, write_rows

EACH, TOGETHER = tl.constexpr(1), tl.constexpr(2)  # what a norm is taken over: a head, or all of them
_HALVES, _TWICE = tl.constexpr(Pairs.HALVES.value), tl.constexpr(Pairs.NEIGHBOURS_TWICE.value)


@triton.jit
def _some_heads(
    heads_ptr, bias_ptr, norm_ptr, start, eps, head, inside, col,
    HEADS: tl.constexpr, DIM: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Heads fp32 [heads, columns] with their bias, normed; `start`: elements of a row before the first."""
    at = head[:, None] * DIM + col[None, :]
    mask = inside[:, None] & (col < DIM)[None, :]
    x = tl.load(heads_ptr + start + at, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        x = rounded(x + tl.load(bias_ptr + start + at, mask=mask, other=0.0).to(tl.float32), DTYPE)
    if NORM == EACH:
        weight = tl.load(norm_ptr + col, mask=col < DIM, other=0.0).to(tl.float32)[None, :]
        x = rounded(x * tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)[:, None] * weight, DTYPE)
    elif NORM == TOGETHER:
        weight = tl.load(norm_ptr + at, mask=mask, other=0.0).to(tl.float32)
        mean = tl.sum(tl.sum(x * x, axis=1), axis=0) / (HEADS * DIM)
        x = rounded(x * tl.rsqrt(mean + eps) * weight, DTYPE)
    return x


@triton.jit
def _turned(x, cos_ptr, sin_ptr, col, ROTARY: tl.constexpr, PAIRS: tl.constexpr, DTYPE: tl.constexpr):
    """Heads fp32 [heads, columns], the first ROTARY elements turned; see Pairs."""
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
    heads_ptr, bias_ptr, cos_ptr, sin_ptr, slot_ptr, bad_ptr, norm_ptr, center_ptr, start, eps, first,
    codes, scales, static, c_block, c_head, c_slot, s_block, s_head, s_slot,
    KIND: tl.constexpr, BITS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, GROUP: tl.constexpr,
    ROTATED: tl.constexpr, STATIC: tl.constexpr, CUT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr, TILE: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, ROTARY: tl.constexpr,
    PAIRS: tl.constexpr, CENTERED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Some heads of K or of V, from the token's row of heads into its slot."""
    slot = tl.load(slot_ptr).to(tl.int64)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    head, col = first + tl.arange(0, TILE), tl.arange(0, PAD)
    inside, wide = head < HEADS, head.to(tl.int64)
    x = _some_heads(
        heads_ptr, bias_ptr, norm_ptr, start, eps, head, inside, col, HEADS, DIM, BIAS, NORM, DTYPE
    )
    x = _turned(x, cos_ptr, sin_ptr, col, ROTARY, PAIRS, DTYPE)
    if CENTERED:
        at = head[:, None] * DIM + col[None, :]
        mask = inside[:, None] & (col < DIM)[None, :]
        x = rounded(x - tl.load(center_ptr + at, mask=mask, other=0.0), DTYPE)
    x, is_bad = finite_rows(x)
    write_rows(
        x, codes, scales, static,
        block * c_block + wide * c_head + offset * c_slot,
        block * s_block + wide * s_head + offset * s_slot,
        head, col, inside, KIND, BITS, DIM, PAD, GROUP, ROTATED, STATIC, CUT, TILE,
    )  # fmt: skip
    tl.store(bad_ptr, is_bad.to(tl.int8), mask=is_bad > 0)  # other programs of the token say it, too


@triton.jit
def _turn_queries(
    heads_ptr, bias_ptr, cos_ptr, sin_ptr, norm_ptr, eps, first,
    DIM: tl.constexpr, PAD: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, BIAS: tl.constexpr,
    NORM: tl.constexpr, ROTARY: tl.constexpr, PAIRS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Some heads of a token's queries, in place."""
    head, col = first + tl.arange(0, TILE), tl.arange(0, PAD)
    inside = head < HEADS
    x = _some_heads(heads_ptr, bias_ptr, norm_ptr, 0, eps, head, inside, col, HEADS, DIM, BIAS, NORM, DTYPE)
    x = _turned(x, cos_ptr, sin_ptr, col, ROTARY, PAIRS, DTYPE)
    mask = inside[:, None] & (col < DIM)[None, :]
    tl.store(heads_ptr + head[:, None] * DIM + col[None, :], x.to(DTYPE), mask=mask)


@triton.jit
def rope_write_kernel(
    heads_ptr, bias_ptr, cos_ptr, sin_ptr, slots_ptr, bad_ptr, heads_row, cos_row, sin_row,
    k_codes, k_scales, k_static, kc_block, kc_head, kc_slot, ks_block, ks_head, ks_slot,
    v_codes, v_scales, v_static, vc_block, vc_head, vc_slot, vs_block, vs_head, vs_slot,
    q_norm, k_norm, k_center, v_center, q_eps, k_eps,
    K_KIND: tl.constexpr, K_BITS: tl.constexpr, K_DIM: tl.constexpr, K_PAD: tl.constexpr,
    K_GROUP: tl.constexpr, K_ROTATED: tl.constexpr, K_STATIC: tl.constexpr, K_CUT: tl.constexpr,
    V_KIND: tl.constexpr, V_BITS: tl.constexpr, V_DIM: tl.constexpr, V_PAD: tl.constexpr,
    V_GROUP: tl.constexpr, V_ROTATED: tl.constexpr, V_STATIC: tl.constexpr, V_CUT: tl.constexpr,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, Q_TILE: tl.constexpr, K_TILE: tl.constexpr,
    V_TILE: tl.constexpr, K_TILES: tl.constexpr, V_TILES: tl.constexpr, BIAS: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, ROTARY: tl.constexpr, PAIRS: tl.constexpr,
    K_CENTERED: tl.constexpr, V_CENTERED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, tiles of heads: of K, then V, then queries)."""
    DTYPE: tl.constexpr = heads_ptr.dtype.element_ty
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, cos, sin = heads_ptr + token * heads_row, cos_ptr + token * cos_row, sin_ptr + token * sin_row
    slot, bad = slots_ptr + token, bad_ptr + token
    if tile < K_TILES:
        _stored(
            row, bias_ptr, cos, sin, slot, bad, k_norm, k_center, Q_HEADS * K_DIM, k_eps, tile * K_TILE,
            k_codes, k_scales, k_static, kc_block, kc_head, kc_slot, ks_block, ks_head, ks_slot,
            K_KIND, K_BITS, K_DIM, K_PAD, K_GROUP, K_ROTATED, K_STATIC, K_CUT, BLOCK_SIZE,
            KV_HEADS, K_TILE, BIAS, K_NORM, ROTARY, PAIRS, K_CENTERED, DTYPE,
        )  # fmt: skip
    elif tile < K_TILES + V_TILES:
        first = (tile - K_TILES) * V_TILE
        _stored(
            row, bias_ptr, cos, sin, slot, bad, k_norm, v_center, (Q_HEADS + KV_HEADS) * K_DIM, 0.0, first,
            v_codes, v_scales, v_static, vc_block, vc_head, vc_slot, vs_block, vs_head, vs_slot,
            V_KIND, V_BITS, V_DIM, V_PAD, V_GROUP, V_ROTATED, V_STATIC, V_CUT, BLOCK_SIZE,
            KV_HEADS, V_TILE, BIAS, 0, 0, PAIRS, V_CENTERED, DTYPE,
        )  # fmt: skip
    else:
        first = (tile - K_TILES - V_TILES) * Q_TILE
        _turn_queries(
            row, bias_ptr, cos, sin, q_norm, q_eps, first,
            K_DIM, K_PAD, Q_HEADS, Q_TILE, BIAS, Q_NORM, ROTARY, PAIRS, DTYPE,
        )  # fmt: skip
