"""Device functions that read rows of any format, one element at a time, as fp32 numbers."""

import triton
import triton.language as tl

from kvq.formats.spec import MOST_PAIRED_BITS
from kvq.kernels.codec import channel
from kvq.kernels.gpu.rows import (
    CHANNEL,
    CHANNEL_INT8,
    FLOAT,
    FP8,
    INT4,
    fp8_codes,
    narrow_scale,
    scale_and_minimum,
)

MOST_PAIRED, CENTER_STEP = tl.constexpr(MOST_PAIRED_BITS), tl.constexpr(channel.CENTER_STEP)
_MOST_SHIFTED = tl.constexpr(channel.MOST_SHIFTED)


@triton.jit
def _plane(codes, at, mask, col, DIM: tl.constexpr, WIDTH: tl.constexpr, BEFORE: tl.constexpr):
    """Return the bits of one plane, shifted to their place in the codes; BEFORE: bits of the wider planes."""
    RUN: tl.constexpr = DIM * WIDTH // 8
    packed = tl.load(codes + at + (DIM * BEFORE // 8 + col % RUN)[None, :], mask=mask, other=0).to(tl.int32)
    return ((packed >> (col // RUN * WIDTH)[None, :]) & ((1 << WIDTH) - 1)) << BEFORE


@triton.jit
def _packed_codes(codes, at, mask, col, DIM: tl.constexpr, BITS: tl.constexpr):
    """Return columns `col` of rows of DIM codes, int32 [rows, columns]; see codec/packing.py."""
    code = tl.zeros(mask.shape, tl.int32)
    for i in tl.static_range(4):
        if BITS & (8 >> i):
            code = code | _plane(codes, at, mask, col, DIM, 8 >> i, BITS & (16 - (16 >> i)))
    return code


@triton.jit
def shared_bits(code, other, BITS: tl.constexpr):
    """Return the bits of channels, int32, from the scale bytes of each channel and its partner."""
    if BITS <= MOST_PAIRED:
        more = code - other
        more = (more + 8 + (more >> 31)) >> 4  # to nearest, ties away from zero
        own = BITS + tl.minimum(tl.maximum(more, -min(_MOST_SHIFTED, BITS - 1)), min(_MOST_SHIFTED, BITS - 1))
    else:
        own = code * 0 + BITS
    return own


@triton.jit
def channel_scale(code, own, BITS: tl.constexpr):
    """Return the fp32 scale of a channel of `own` bits, computed from its byte; see codec/channel.py."""
    factor = tl.full(own.shape, 1.0, tl.float32)
    if BITS <= MOST_PAIRED:
        for bits in tl.static_range(1, BITS + _MOST_SHIFTED + 1):
            factor = tl.where(own == bits, ((1 << BITS) - 1) / ((1 << bits) - 1), factor)
    return narrow_scale(code) * factor


@triton.jit
def channel_rows(
    codes, scales, codes_at, scales_at, inside, col, KIND: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """Return rows with per-channel scales, fp32 [rows, columns]; `scales_at`: blocks' offsets in bytes."""
    mask = inside[:, None] & (col < DIM)[None, :]
    at, bytes_at = codes_at[:, None], scales + scales_at[:, None]
    byte = tl.load(bytes_at + col[None, :], mask=mask, other=0).to(tl.int32)
    if KIND == CHANNEL_INT8:
        steps = tl.load(bytes_at + (DIM + col)[None, :], mask=mask, other=0).to(tl.int8, bitcast=True)
        code = tl.load(codes + (at + col[None, :]), mask=mask, other=0).to(tl.int32)
        x = (code + steps.to(tl.int32) * CENTER_STEP).to(tl.float32) * narrow_scale(byte)  # exact
    else:
        halves = (bytes_at + DIM).to(tl.pointer_type(tl.float16), bitcast=True)
        minimum = tl.load(halves + col[None, :], mask=mask, other=0.0).to(tl.float32)
        other = tl.load(bytes_at + (DIM - 1 - col)[None, :], mask=mask, other=0).to(tl.int32)
        own = shared_bits(byte, other, BITS)
        if BITS <= MOST_PAIRED:
            high = col >= DIM // 2
            pair = tl.where(high, DIM - 1 - col, col)
            code = _packed_codes(codes, at, mask, pair, DIM // 2, 2 * BITS)
            code = tl.where(high[None, :], code >> (2 * BITS - own), code & ((1 << own) - 1))
        else:
            code = _packed_codes(codes, at, mask, col, DIM, BITS)
        x = code.to(tl.float32) * channel_scale(byte, own, BITS) + minimum
    return x


@triton.jit
def grouped_rows(
    codes, scales, codes_at, scales_at, inside, col,
    DIM: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Return rows of grouped codes of any width, fp32 [rows, columns]; see codec/packing.py for planes."""
    mask = inside[:, None] & (col < DIM)[None, :]
    code = _packed_codes(codes, codes_at[:, None], mask, col, DIM, BITS)
    words = tl.load(scales + scales_at[:, None] + (col // GROUP)[None, :], mask=mask, other=0)
    scale, minimum = scale_and_minimum(words, BITS)
    return code.to(tl.float32) * scale + minimum


@triton.jit
def mean_rows(means, at, inside, col, DIM: tl.constexpr, GROUP: tl.constexpr):
    """Return block means, fp32 [rows, columns]; `at`: offsets in bytes. See mean_format."""
    scales = (means + DIM // 2).to(tl.pointer_type(tl.int16), bitcast=True)
    return grouped_rows(means, scales, at, at // 2, inside, col, DIM, GROUP, 4)


@triton.jit
def stored_rows(rows, codes, scales, codes_at, scales_at, head, inside, col):
    """Return K or V rows of any format, fp32 [rows, columns], still rotated; `rows`: kernel argument."""
    mask = inside[:, None] & (col < rows.dim)[None, :]
    if rows.kind >= CHANNEL:
        x = channel_rows(codes, scales, codes_at, scales_at, inside, col, rows.kind, rows.dim, rows.bits)
    elif rows.kind >= INT4:  # any other grouped code
        x = grouped_rows(codes, scales, codes_at, scales_at, inside, col, rows.dim, rows.group, rows.bits)
    else:
        stored = tl.load(codes + (codes_at[:, None] + col[None, :]), mask=mask, other=0)
        if rows.kind == FP8:
            x = fp8_codes(stored, tl.float32) * 256.0
        else:
            x = stored.to(tl.float32)
        if rows.kind != FLOAT:
            if rows.static is not None:
                x = x * tl.load(rows.static + head)
            else:
                x = x * tl.load(scales + scales_at, mask=inside, other=0.0).to(tl.float32)[:, None]
    return x
