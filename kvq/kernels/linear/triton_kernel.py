"""The device code of `linear_w4` and `linear_w8` in Triton: products, sums of parts, inputs, dense weights."""

import triton
import triton.language as tl

from kvq.kernels.linear.triton_codes import ROWS, SIGNED_NIBBLES, columns, weight_tile


@triton.jit
def _input_columns(block, group, blocks_per_group, BK: tl.constexpr, WHOLE: tl.constexpr):
    """The inputs of a block, [BK], and which of them its group holds; WHOLE: groups are whole blocks."""
    step = tl.arange(0, BK)
    if WHOLE:
        start = block * BK
        inside = step < BK
    else:
        own = block // blocks_per_group
        offset = (block - own * blocks_per_group) * BK
        start = own * group + offset
        inside = offset + step < group
    return start + step, inside


@triton.jit
def linear_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, x_scale_ptr, x_sum_ptr, out_ptr,
    rows, x_row, w_rows, outputs, padded, blocks, split_blocks, group, blocks_per_group, groups,
    out_split, out_row,
    KIND: tl.constexpr, COMPUTE: tl.constexpr, UNIT: tl.constexpr, BK: tl.constexpr, RUNS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, WARPS: tl.constexpr, WHOLE: tl.constexpr, GROUPED: tl.constexpr,
    ASYMMETRIC: tl.constexpr, INTEGER: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of rows, tiles of outputs, parts of the inputs). Codes are never scaled: scales multiply
    a group's product, in fp32.

    GROUPED: a row has several scales. INTEGER: INT8 products, exact in int32, whose zero points enter as
    zero * sum(inputs). SCALED: inputs are codes with a scale for each row.
    """
    tile, first = tl.program_id(1), tl.program_id(2) * split_blocks
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    valid = row < rows
    output = columns(tile * BN, BN, RUNS, WARPS)
    last = tl.minimum(first + split_blocks, blocks)
    total = tl.zeros((BM, BN), tl.float32)
    product = tl.zeros((BM, BN), tl.int32 if INTEGER else tl.float32)
    at = tl.cast(first // blocks_per_group, tl.int64) * padded + output
    scale = tl.load(scale_ptr + at)
    zero = scale
    if ASYMMETRIC:
        zero = tl.load(zero_ptr + at)
    for block in range(first, last):
        own = block // blocks_per_group
        next_scale, next_zero = scale, zero
        if GROUPED:  # a step ahead: words of two bytes are not copied asynchronously
            at = tl.cast(tl.minimum(block + 1, blocks - 1) // blocks_per_group, tl.int64) * padded + output
            next_scale = tl.load(scale_ptr + at)
            if ASYMMETRIC:
                next_zero = tl.load(zero_ptr + at)
        column, inside = _input_columns(block, group, blocks_per_group, BK, WHOLE)
        mask = valid[:, None] & inside[None, :]
        x = tl.load(x_ptr + row[:, None] * x_row + column[None, :], mask=mask, other=0.0)
        w = weight_tile(w_ptr, block, tile, w_rows, KIND, COMPUTE, BK, BN, RUNS, WARPS)
        if KIND != ROWS and KIND != SIGNED_NIBBLES:
            x = x.to(COMPUTE)
            if ASYMMETRIC:
                w = w - zero.to(COMPUTE)[None, :]
        if GROUPED:
            if INTEGER:
                part = tl.dot(x, w, out_dtype=tl.int32)
                if ASYMMETRIC:
                    if block == own * blocks_per_group:  # the sums are of whole groups
                        sums = tl.load(x_sum_ptr + row * groups + own, mask=valid, other=0)
                        offset: tl.constexpr = 16 if KIND == SIGNED_NIBBLES else 1
                        part -= sums[:, None] * (zero.to(tl.int32) * offset)[None, :]
                total += part.to(tl.float32) * scale.to(tl.float32)[None, :]
            else:
                part = tl.dot(x, w, input_precision="ieee", max_num_imprecise_acc=128)
                total += part * scale.to(tl.float32)[None, :]
        elif INTEGER:
            product = tl.dot(x, w, product, out_dtype=tl.int32)
        else:
            product = tl.dot(x, w, product, input_precision="ieee", max_num_imprecise_acc=128)
        scale, zero = next_scale, next_zero
    if not GROUPED:
        if INTEGER:
            if ASYMMETRIC:
                if first == 0:  # the sums are of whole rows
                    sums = tl.load(x_sum_ptr + row, mask=valid, other=0)
                    offset: tl.constexpr = 16 if KIND == SIGNED_NIBBLES else 1
                    product -= sums[:, None] * (zero.to(tl.int32) * offset)[None, :]
        total = product.to(tl.float32) * scale.to(tl.float32)[None, :]
    total = total * UNIT
    if SCALED:
        total = total * tl.load(x_scale_ptr + row, mask=valid, other=0.0)[:, None]
    into = out_ptr + tl.program_id(2).to(tl.int64) * out_split + row[:, None] * out_row + output[None, :]
    mask = valid[:, None] & (output < outputs)[None, :]
    tl.store(into, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_parts_kernel(parts_ptr, out_ptr, count, splits, WIDTH: tl.constexpr):
    """out [count] = the sum of parts [splits, count], always in the same order."""
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    mask = at < count
    total = tl.load(parts_ptr + at, mask=mask, other=0.0)
    for split in range(1, splits):
        total += tl.load(parts_ptr + tl.cast(split, tl.int64) * count + at, mask=mask, other=0.0)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _e4m3(x):
    """fp32 in [-448, 448] rounded to E4M3 values, and their bytes; see codec/e4m3.py."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    magnitude = bits.to(tl.float32, bitcast=True)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    small = magnitude < 0.015625
    moved = magnitude + 16384.0
    codes = tl.where(small, moved.to(tl.int32, bitcast=True) - 0x46800000, normal - ((127 - 7) << 3)) | sign
    rounded = tl.where(small, moved - 16384.0, (normal << 20).to(tl.float32, bitcast=True))
    return tl.where(sign != 0, -rounded, rounded), codes


@triton.jit
def quantize_kernel(
    x_ptr, codes_ptr, scale_ptr, x_row, inputs,
    FP8: tl.constexpr, BYTES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program per row: the bits of linear/inputs.py. FP8: E4M3, as bytes or as their values."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, WIDTH)
    largest = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, inputs, WIDTH):
        x = tl.load(x_ptr + row * x_row + start + col, mask=start + col < inputs, other=0.0)
        largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
    top = tl.max(largest, axis=0)
    limit: tl.constexpr = 448.0 if FP8 else 127.0
    scale = tl.where(top > 0, tl.div_rn(top, limit), 1.0)
    tl.store(scale_ptr + row, scale)
    for start in range(0, inputs, WIDTH):
        mask = start + col < inputs
        x = tl.load(x_ptr + row * x_row + start + col, mask=mask, other=0.0).to(tl.float32)
        y = tl.div_rn(x, scale + tl.zeros((WIDTH,), tl.float32))
        y = tl.minimum(tl.maximum(y, -limit), limit)
        if FP8:
            values, bits = _e4m3(y)
            codes = bits if BYTES else values
        else:
            codes = (y + 12582912.0) - 12582912.0  # to nearest, ties to even: the last bit is 1
        tl.store(codes_ptr + row * inputs + start + col, codes.to(codes_ptr.dtype.element_ty), mask=mask)


@triton.jit
def dequantize_kernel(
    w_ptr, scale_ptr, zero_ptr, out_ptr, w_rows, first_tile, outputs, padded, group, blocks_per_group, out_row,
    KIND: tl.constexpr, COMPUTE: tl.constexpr, UNIT: tl.constexpr, BK: tl.constexpr, RUNS: tl.constexpr,
    BN: tl.constexpr, WARPS: tl.constexpr, WHOLE: tl.constexpr, ASYMMETRIC: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of inputs, tiles of outputs). Weights [outputs from `first_tile` on, inputs]."""
    block, tile = tl.program_id(0), first_tile + tl.program_id(1)
    output = columns(tile * BN, BN, RUNS, WARPS)
    at = tl.cast(block // blocks_per_group, tl.int64) * padded + output
    w = weight_tile(w_ptr, block, tile, w_rows, KIND, COMPUTE, BK, BN, RUNS, WARPS).to(tl.float32)
    if ASYMMETRIC:
        w = w - tl.load(zero_ptr + at).to(tl.float32)[None, :]
    w = w * (tl.load(scale_ptr + at).to(tl.float32) * UNIT)[None, :]
    column, inside = _input_columns(block, group, blocks_per_group, BK, WHOLE)
    row = (output - first_tile * BN).to(tl.int64)
    into = out_ptr + row[:, None] * out_row + column[None, :]
    mask = (output < outputs)[:, None] & inside[None, :]
    tl.store(into, tl.trans(w).to(out_ptr.dtype.element_ty), mask=mask)
