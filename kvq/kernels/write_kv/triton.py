"""`write_kv` in Triton: one launch quantizes, rotates and scatters K and V of all heads."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq.formats import KVFormat
from kvq.kernels.gpu.arguments import dense_strides, part_arguments
from kvq.kernels.gpu.rows import FLOAT, FP8, INT4, e4m3, narrow_scale, rotate
from kvq.kernels.paged import PagedKV

_FP32_LARGEST = tl.constexpr(3.4028234663852886e38)
_FP16_LARGEST = tl.constexpr(65504.0)
_BF16_LARGEST = tl.constexpr(3.3895313892515355e38)
_SMALLEST_SCALE = tl.constexpr(2.0**-24)


def write_kv(k: Tensor, v: Tensor, kv: PagedKV, slots: Tensor) -> Tensor:
    """Do what the reference does, with the same bytes; see there. Slots are not checked."""
    tokens, heads = k.shape[:2]
    bad = torch.empty(tokens, dtype=torch.bool, device=k.device)
    if not tokens:
        return bad
    k_part, v_part = part_arguments("k", kv), part_arguments("v", kv)
    _write_kernel[(tokens,)](
        k,
        v,
        slots,
        bad.view(torch.int8),
        **stored_as_bits(k_part, "k"),
        **stored_as_bits(v_part, "v"),
        **dense_strides("k", k),
        **dense_strides("v", v),
        K_CUT=cut_of(kv.formats.k, kv.formats.k_clip),
        V_CUT=cut_of(kv.formats.v, kv.formats.v_clip),
        BLOCK_SIZE=kv.block_size,
        HEADS=heads,
        HEADS_PAD=triton.next_power_of_2(heads),
        num_warps=4,
        enable_fp_fusion=False,  # a product and a sum rounded once would change codes
    )
    return bad


def cut_of(fmt: KVFormat, clip: float) -> float:
    """The part of a group's range at either end that its codes don't span."""
    return (1 - clip * fmt.span) / 2


def stored_as_bits(part: dict[str, Any], prefix: str) -> dict[str, Any]:
    """bf16 codes as the integers that they are: the interpreter can't cast to bf16."""
    codes = part[f"{prefix}_codes"]
    if codes.dtype is torch.bfloat16:
        part[f"{prefix}_codes"] = codes.view(torch.int16)
    if part[f"{prefix}_scales"] is codes:
        part[f"{prefix}_scales"] = part[f"{prefix}_codes"]
    return part


@triton.jit
def _as_scale(x):
    """fp32 as the nearest fp16 number within the range of scales, as fp32."""
    return tl.minimum(tl.maximum(x.to(tl.float16).to(tl.float32), _SMALLEST_SCALE), _FP16_LARGEST)


@triton.jit
def _as_float(x, codes):
    """Round to the codes' dtype, saturating; bf16 is stored as integers."""
    if codes.dtype.element_ty == tl.float32:
        rounded = x
    elif codes.dtype.element_ty == tl.float16:
        rounded = tl.minimum(tl.maximum(x, -_FP16_LARGEST), _FP16_LARGEST).to(tl.float16)
    else:
        bits = tl.minimum(tl.maximum(x, -_BF16_LARGEST), _BF16_LARGEST).to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    return rounded


@triton.jit
def half_minimum(low):
    """The minimum of codes that begin at `low`, in fp16; never -0."""
    return (tl.minimum(tl.maximum(low, -_FP16_LARGEST), _FP16_LARGEST) + 0.0).to(tl.float16)


@triton.jit
def _wide_scale(low, high, LEVELS: tl.constexpr):
    """Scale and minimum of groups between `low` and `high`, fp32, and their words of 32 bits."""
    minimum = half_minimum(low)
    start = minimum.to(tl.float32)
    scale = _as_scale(tl.div_rn(high - start, LEVELS))
    low_half = scale.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return scale, start, (minimum.to(tl.int16, bitcast=True).to(tl.int32) << 16) | low_half


@triton.jit
def scale_byte(wanted, UP: tl.constexpr):
    """The byte of a scale, int32, nearest to `wanted` or, UP, the next not below; see codec/narrow.py."""
    bits = tl.minimum(tl.maximum(wanted, 2.0**-19), 1920.0).to(tl.int32, bitcast=True)
    more: tl.constexpr = (1 << 20) - 1 if UP else 1 << 19
    return tl.minimum(((bits + more) >> 20) - (107 << 3), 247)


@triton.jit
def _narrow_scale(low, high, LEVELS: tl.constexpr, STEP: tl.constexpr):
    """The same in words of 16 bits. STEP: of a minimum, in scales."""
    wanted = tl.div_rn(tl.maximum(high - low, tl.abs(low)), LEVELS)
    code = scale_byte(wanted, LEVELS >= 31)
    scale = narrow_scale(code)
    steps = tl.floor(tl.div_rn(low * (1 / STEP), scale) + 0.5)
    steps = tl.minimum(tl.maximum(steps, -128.0), 127.0)
    return scale, steps * STEP * scale, ((steps.to(tl.int32) << 8) | code).to(tl.int16)


@triton.jit
def quantize_groups(
    x, scales, at, inside, col, DIM: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, CUT: tl.constexpr
):
    """Asymmetric codes uint8 of rows [heads, dim], and what they stand for; stores their scales and minimums.
    CUT: as of KvqRows."""
    levels: tl.constexpr = float((1 << BITS) - 1)
    q = tl.zeros(x.shape, tl.float32)
    values = q
    for group in tl.static_range(DIM // GROUP):
        own = ((col >= group * GROUP) & (col < (group + 1) * GROUP))[None, :]
        low = tl.min(tl.where(own, x, float("inf")), axis=1)
        high = tl.max(tl.where(own, x, float("-inf")), axis=1)
        if CUT != 0.0:
            cut = high * CUT - low * CUT
            low, high = low + cut, high - cut
        if scales.dtype.element_ty == tl.int16:
            scale, start, word = _narrow_scale(low, high, levels, 2.0 ** (BITS - 7))
        else:
            scale, start, word = _wide_scale(low, high, levels)
        code = tl.floor(tl.div_rn(x - start[:, None], scale[:, None]) + 0.5)
        code = tl.minimum(tl.maximum(code, 0.0), levels)
        q = tl.where(own, code, q)
        values = tl.where(own, code * scale[:, None] + start[:, None], values)
        tl.store(scales + at + group, word, mask=inside)
    return q.to(tl.uint8), values


@triton.jit
def _store_plane(
    to, q, mask, col, DIM: tl.constexpr, PAD: tl.constexpr, WIDTH: tl.constexpr, BEFORE: tl.constexpr
):
    """One plane of codes uint8 [heads, PAD]; BEFORE: bits of the wider planes. See codec/reference.py."""
    RUN: tl.constexpr = DIM * WIDTH // 8
    plane = (q >> BEFORE) & ((1 << WIDTH) - 1)
    packed = plane
    for part in tl.static_range(1, 8 // WIDTH):
        other = tl.broadcast_to(tl.minimum(col + part * RUN, PAD - 1)[None, :], q.shape)
        packed = packed | (tl.gather(plane, other, axis=1) << (part * WIDTH))
    tl.store(to + DIM * BEFORE // 8, packed, mask=mask & (col < RUN)[None, :])


@triton.jit
def store_codes(to, q, mask, col, DIM: tl.constexpr, PAD: tl.constexpr, BITS: tl.constexpr):
    """Codes uint8 [heads, PAD] in their planes."""
    for i in tl.static_range(4):
        if BITS & (8 >> i):
            _store_plane(to, q, mask, col, DIM, PAD, 8 >> i, BITS & (16 - (16 >> i)))


@triton.jit
def turned_rows(x, ROWS: tl.constexpr, PAD: tl.constexpr, ROTATED: tl.constexpr):
    """Finite rows fp32 [ROWS, PAD] rotated, if they are, so that no butterfly overflows."""
    if ROTATED > 1:
        bound: tl.constexpr = _FP32_LARGEST / ROTATED
        x = rotate(tl.minimum(tl.maximum(x, -bound), bound), ROWS, PAD, ROTATED)
    return x


@triton.jit
def write_rows(
    x, codes, scales, static, codes_at, scales_at, head, col, inside,
    KIND: tl.constexpr, BITS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, GROUP: tl.constexpr,
    ROTATED: tl.constexpr, STATIC: tl.constexpr, CUT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store one token's rows fp32 [heads, dim], finite; `codes_at`, `scales_at`: offsets by head."""
    mask = inside[:, None] & (col < DIM)[None, :]
    x = turned_rows(x, ROWS, PAD, ROTATED)
    at = codes_at[:, None] + col[None, :]
    if KIND == FLOAT:
        tl.store(codes + at, _as_float(x, codes), mask=mask)
    elif KIND >= INT4:  # or GROUPED
        q, _ = quantize_groups(x, scales, scales_at, inside, col, DIM, GROUP, BITS, CUT)
        store_codes(codes + at, q, mask, col, DIM, PAD, BITS)
    else:
        largest: tl.constexpr = 448.0 if KIND == FP8 else 127.0
        if STATIC:
            scale = tl.load(static + head, mask=inside, other=1.0)
        else:
            scale = _as_scale(tl.div_rn(tl.max(tl.abs(x), axis=1), largest))
            tl.store(scales + scales_at, scale.to(tl.float16), mask=inside)
        y = tl.div_rn(x, scale[:, None])
        if KIND == FP8:
            _, codes_of_y = e4m3(tl.minimum(tl.maximum(y, -largest), largest))
            tl.store(codes + at, codes_of_y.to(tl.uint8), mask=mask)
        else:
            y = tl.minimum(tl.maximum(tl.floor(y + 0.5), -127.0), 127.0)
            tl.store(codes + at, y.to(tl.int8), mask=mask)


@triton.jit
def finite_rows(x):
    """Rows fp32 with zero for what is not finite, and whether anything was not, 0 or 1."""
    finite = tl.abs(x) <= _FP32_LARGEST
    return tl.where(finite, x, 0.0), tl.max(tl.max(tl.where(finite, 0, 1), axis=1), axis=0)


@triton.jit
def _write_kernel(
    k_ptr, v_ptr, slots_ptr, bad_ptr,
    k_codes, k_scales, k_static, kc_block, kc_head, kc_slot, ks_block, ks_head, ks_slot,
    v_codes, v_scales, v_static, vc_block, vc_head, vc_slot, vs_block, vs_head, vs_slot,
    k_token, k_head, k_dim, v_token, v_head, v_dim,
    K_KIND: tl.constexpr, K_BITS: tl.constexpr, K_DIM: tl.constexpr, K_PAD: tl.constexpr,
    K_GROUP: tl.constexpr, K_ROTATED: tl.constexpr, K_STATIC: tl.constexpr,
    V_KIND: tl.constexpr, V_BITS: tl.constexpr, V_DIM: tl.constexpr, V_PAD: tl.constexpr,
    V_GROUP: tl.constexpr, V_ROTATED: tl.constexpr, V_STATIC: tl.constexpr,
    K_CUT: tl.constexpr, V_CUT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr,
):  # fmt: skip
    """One program per token: all heads of K, then of V. A token with a slot below 0 is padding."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        tl.store(bad_ptr + token, 0)
        return
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    head = tl.arange(0, HEADS_PAD)
    inside = head < HEADS
    wide = head.to(tl.int64)
    col = tl.arange(0, K_PAD)
    at = token * k_token + wide[:, None] * k_head + col[None, :] * k_dim
    mask = inside[:, None] & (col < K_DIM)[None, :]
    k, k_bad = finite_rows(tl.load(k_ptr + at, mask=mask, other=0.0).to(tl.float32))
    write_rows(
        k, k_codes, k_scales, k_static,
        block * kc_block + wide * kc_head + offset * kc_slot,
        block * ks_block + wide * ks_head + offset * ks_slot,
        head, col, inside, K_KIND, K_BITS, K_DIM, K_PAD, K_GROUP, K_ROTATED, K_STATIC, K_CUT, HEADS_PAD,
    )  # fmt: skip
    col = tl.arange(0, V_PAD)
    at = token * v_token + wide[:, None] * v_head + col[None, :] * v_dim
    mask = inside[:, None] & (col < V_DIM)[None, :]
    v, v_bad = finite_rows(tl.load(v_ptr + at, mask=mask, other=0.0).to(tl.float32))
    write_rows(
        v, v_codes, v_scales, v_static,
        block * vc_block + wide * vc_head + offset * vc_slot,
        block * vs_block + wide * vs_head + offset * vs_slot,
        head, col, inside, V_KIND, V_BITS, V_DIM, V_PAD, V_GROUP, V_ROTATED, V_STATIC, V_CUT, HEADS_PAD,
    )  # fmt: skip
    tl.store(bad_ptr + token, (k_bad | v_bad).to(tl.int8))
