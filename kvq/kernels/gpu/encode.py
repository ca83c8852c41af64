"""Device functions of the Triton kernels that quantize and store rows; codec/ defines the correct results."""

import triton
import triton.language as tl

from kvq.kernels.gpu.rows import FLOAT, FP8, INT4, e4m3, narrow_scale, rotate

_FP32_LARGEST = tl.constexpr(3.4028234663852886e38)
_FP16_LARGEST = tl.constexpr(65504.0)
_BF16_LARGEST = tl.constexpr(3.3895313892515355e38)
_SMALLEST_SCALE = tl.constexpr(2.0**-24)


@triton.jit
def _as_scale(x):
    """Round fp32 to the nearest fp16 number in the range of scales, returned as fp32."""
    return tl.minimum(tl.maximum(x.to(tl.float16).to(tl.float32), _SMALLEST_SCALE), _FP16_LARGEST)


@triton.jit
def _as_float(x, codes):
    """Round to the dtype of the codes, saturating; bf16 is stored as integers."""
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
    """Return the fp16 minimum of a group whose range starts at `low`; never -0."""
    return (tl.minimum(tl.maximum(low, -_FP16_LARGEST), _FP16_LARGEST) + 0.0).to(tl.float16)


@triton.jit
def _wide_scale(low, high, LEVELS: tl.constexpr):
    """Return the fp32 scale and minimum of groups with the range `low` to `high`, and their 32-bit words."""
    minimum = half_minimum(low)
    start = minimum.to(tl.float32)
    scale = _as_scale(tl.div_rn(high - start, LEVELS))
    low_half = scale.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return scale, start, (minimum.to(tl.int16, bitcast=True).to(tl.int32) << 16) | low_half


@triton.jit
def scale_byte(wanted, UP: tl.constexpr):
    """Return a scale's byte, int32: nearest to `wanted` or, if UP, not below it; see codec/narrow.py."""
    bits = tl.minimum(tl.maximum(wanted, 2.0**-19), 1920.0).to(tl.int32, bitcast=True)
    more: tl.constexpr = (1 << 20) - 1 if UP else 1 << 19
    return tl.minimum(((bits + more) >> 20) - (107 << 3), 247)


@triton.jit
def _narrow_scale(low, high, LEVELS: tl.constexpr, STEP: tl.constexpr):
    """Return scale, minimum and 16-bit words, like `_wide_scale`. STEP: unit of minimums, in scales."""
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
    """Quantize rows [heads, dim] to asymmetric codes, uint8; return the codes and their values, and store
    scales and minimums. CUT: as in KvqRows."""
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
    """Store one plane of codes, uint8 [heads, PAD]; BEFORE: bits of wider planes. See codec/packing.py."""
    RUN: tl.constexpr = DIM * WIDTH // 8
    plane = (q >> BEFORE) & ((1 << WIDTH) - 1)
    packed = plane
    for part in tl.static_range(1, 8 // WIDTH):
        other = tl.broadcast_to(tl.minimum(col + part * RUN, PAD - 1)[None, :], q.shape)
        packed = packed | (tl.gather(plane, other, axis=1) << (part * WIDTH))
    tl.store(to + DIM * BEFORE // 8, packed, mask=mask & (col < RUN)[None, :])


@triton.jit
def store_codes(to, q, mask, col, DIM: tl.constexpr, PAD: tl.constexpr, BITS: tl.constexpr):
    """Store codes, uint8 [heads, PAD], plane by plane."""
    for i in tl.static_range(4):
        if BITS & (8 >> i):
            _store_plane(to, q, mask, col, DIM, PAD, 8 >> i, BITS & (16 - (16 >> i)))


@triton.jit
def turned_rows(x, ROWS: tl.constexpr, PAD: tl.constexpr, ROTATED: tl.constexpr):
    """Rotate finite rows, fp32 [ROWS, PAD], if ROTATED is greater than 1, so that no butterfly overflows."""
    if ROTATED > 1:
        bound: tl.constexpr = _FP32_LARGEST / ROTATED
        x = rotate(tl.minimum(tl.maximum(x, -bound), bound), ROWS, PAD, ROTATED)
    return x


@triton.jit
def write_rows(x, rows, codes_at, scales_at, head, col, inside):
    """Store one token's rows, fp32 [heads, dim], finite and already rotated. `rows`: kernel argument;
    `codes_at`, `scales_at`: offset of each head."""
    mask = inside[:, None] & (col < rows.dim)[None, :]
    at = codes_at[:, None] + col[None, :]
    if rows.kind == FLOAT:
        tl.store(rows.codes + at, _as_float(x, rows.codes), mask=mask)
    elif rows.kind >= INT4:  # or GROUPED
        q, _ = quantize_groups(
            x, rows.scales, scales_at, inside, col, rows.dim, rows.group, rows.bits, rows.cut
        )
        store_codes(rows.codes + at, q, mask, col, rows.dim, rows.pad, rows.bits)
    else:
        largest: tl.constexpr = 448.0 if rows.kind == FP8 else 127.0
        if rows.static is not None:
            scale = tl.load(rows.static + head, mask=inside, other=1.0)
        else:
            scale = _as_scale(tl.div_rn(tl.max(tl.abs(x), axis=1), largest))
            tl.store(rows.scales + scales_at, scale.to(tl.float16), mask=inside)
        y = tl.div_rn(x, scale[:, None])
        if rows.kind == FP8:
            _, codes_of_y = e4m3(tl.minimum(tl.maximum(y, -largest), largest))
            tl.store(rows.codes + at, codes_of_y.to(tl.uint8), mask=mask)
        else:
            y = tl.minimum(tl.maximum(tl.floor(y + 0.5), -127.0), 127.0)
            tl.store(rows.codes + at, y.to(tl.int8), mask=mask)


@triton.jit
def write_token(x, rows, block, offset, head, col, inside, ROWS: tl.constexpr):
    """Store one token's rows, fp32 [heads, dim], finite, in a block's slot."""
    codes, scales, wide = rows.code_strides, rows.scale_strides, head.to(tl.int64)
    write_rows(
        turned_rows(x, ROWS, rows.pad, rows.rotated),
        rows,
        block * codes.block + wide * codes.head + offset * codes.slot,
        block * scales.block + wide * scales.head + offset * scales.slot,
        head,
        col,
        inside,
    )


@triton.jit
def finite_rows(x):
    """Return fp32 rows with nonfinite values replaced by zeros, and 1 if there were any, otherwise 0."""
    finite = tl.abs(x) <= _FP32_LARGEST
    return tl.where(finite, x, 0.0), tl.max(tl.max(tl.where(finite, 0, 1), axis=1), axis=0)
