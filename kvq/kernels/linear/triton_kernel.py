"""Device code of `linear_w4` and `linear_w8`: products, sums of parts, input rounding, and dense weights."""

import triton
import triton.language as tl

from kvq.kernels.gpu.rows import e4m3
from kvq.kernels.linear.triton_codes import Q4_K, ROWS, SIGNED_NIBBLES, columns, half_scales, weight_tile


@triton.jit
def _input_columns(
    block, part, group, blocks_per_group, BK: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr
):
    """Return WIDTH input indices of a block, from `part` * WIDTH on, and a mask of those in the group.

    WHOLE: groups consist of complete blocks.
    """
    step = part * WIDTH + tl.arange(0, WIDTH)
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
def _inputs(
    x_ptr, row, valid, x_row, block, part, group, blocks_per_group,
    KIND: tl.constexpr, COMPUTE: tl.constexpr, BK: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Load a product's first factor [rows, WIDTH], with zeros past the last row or input."""
    column, inside = _input_columns(block, part, group, blocks_per_group, BK, WIDTH, WHOLE)
    at = row[:, None] * x_row + column[None, :]
    mask = valid[:, None]
    if not WHOLE:
        mask = mask & inside[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    if KIND != ROWS and KIND != SIGNED_NIBBLES:
        x = x.to(COMPUTE)
    return x


@triton.jit
def _add_product(x, w, zero, total, COMPUTE: tl.constexpr, INTEGER: tl.constexpr, ASYMMETRIC: tl.constexpr):
    """Return total + x (w - zero) or, for integers, whose zero points are applied later, total + x w."""
    if INTEGER:
        total = tl.dot(x, w, total, out_dtype=tl.int32)
    else:
        if ASYMMETRIC:
            w = w - zero.to(COMPUTE)[None, :]
        total = tl.dot(x, w, total, input_precision="ieee", max_num_imprecise_acc=128)
    return total


@triton.jit
def _less_zeros(
    product, x_sum_ptr, row, counted, groups, own, zero, KIND: tl.constexpr, ASYMMETRIC: tl.constexpr
):
    """Return an integer product minus zero * sum(inputs of the group), int32, for rows in `counted`."""
    if ASYMMETRIC:
        sums = tl.load(x_sum_ptr + row * groups + own, mask=counted, other=0)
        UNIT: tl.constexpr = 16 if KIND == SIGNED_NIBBLES else 1
        product -= sums[:, None] * (zero.to(tl.int32) * UNIT)[None, :]
    return product


@triton.jit
def _scales(scale_ptr, zero_ptr, block, blocks_per_group, padded, output, KIND: tl.constexpr):
    """Return the scales of a block's group, [BN], and their zero points; for Q4_K and Q6_K, finer scales."""
    at = tl.cast(block // blocks_per_group, tl.int64) * padded + output
    scale = tl.load(scale_ptr + at)
    zero = scale
    if KIND >= Q4_K:
        at = tl.cast(block, tl.int64) * padded + output
    if zero_ptr is not None:
        zero = tl.load(zero_ptr + at)
    return scale, zero


@triton.jit
def _add_half(
    total, product, x_sum_ptr, row, valid, block, blocks, scale, fine, PART: tl.constexpr, KIND: tl.constexpr
):
    """Add the scaled product of half a block of Q4_K or Q6_K, less its minimum times its sum of inputs."""
    own, minimum = half_scales(scale, fine, PART, KIND)
    total += product * own[None, :]
    if KIND == Q4_K:
        sums = tl.load(x_sum_ptr + (row * blocks + block) * 2 + PART, mask=valid, other=0.0)
        total -= sums[:, None] * minimum[None, :]
    return total


@triton.jit
def linear_kernel(
    x_ptr, x_scale_ptr, x_sum_ptr, out_ptr, rows, x_row, out_split,
    w_ptr, scale_ptr, zero_ptr, w_rows, outputs, padded, blocks, split_blocks, group, blocks_per_group,
    groups,
    KIND: tl.constexpr, COMPUTE: tl.constexpr, UNIT: tl.constexpr, BK: tl.constexpr, WIDTH: tl.constexpr,
    RUNS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WARPS: tl.constexpr, WHOLE: tl.constexpr,
    GROUPED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Multiply. Grid: (tiles of rows, tiles of outputs, parts of the inputs). Scales multiply a group's
    product in fp32, never the codes. WIDTH inputs are multiplied at a time; for nibbles, this is half a block
    (BK).

    FINE: each half of a block is a group (Q4_K, Q6_K). GROUPED: a row has several scales. INTEGER: inputs are
    INT8, products are exact in int32, and zero points are applied as zero * sum(inputs). SCALED: inputs are
    codes with a scale for each row.
    """
    FINE: tl.constexpr = KIND >= Q4_K
    INTEGER: tl.constexpr = x_ptr.dtype.element_ty == tl.int8
    ASYMMETRIC: tl.constexpr = zero_ptr is not None and not FINE
    tile, first = tl.program_id(1), tl.program_id(2) * split_blocks
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    valid = row < rows
    output = columns(tile * BN, BN, RUNS, WARPS)
    last = tl.minimum(first + split_blocks, blocks)
    total = tl.zeros((BM, BN), tl.float32)
    product = tl.zeros((BM, BN), tl.int32 if INTEGER else tl.float32)
    scale, zero = _scales(scale_ptr, zero_ptr, first, blocks_per_group, padded, output, KIND)
    for block in range(first, last):
        own = block // blocks_per_group
        next_scale, next_zero = scale, zero
        if GROUPED:  # a step ahead: words of two bytes are not copied asynchronously
            following = tl.minimum(block + 1, blocks - 1)
            next_scale, next_zero = _scales(
                scale_ptr, zero_ptr, following, blocks_per_group, padded, output, KIND
            )
        x = _inputs(
            x_ptr, row, valid, x_row, block, 0, group, blocks_per_group, KIND, COMPUTE, BK, WIDTH, WHOLE
        )  # fmt: skip
        w, other_w = weight_tile(w_ptr, block, tile, w_rows, KIND, COMPUTE, WIDTH, BN, RUNS, WARPS)
        part = tl.zeros((BM, BN), product.dtype) if GROUPED else product
        part = _add_product(x, w, zero, part, COMPUTE, INTEGER, ASYMMETRIC)
        if FINE:
            total = _add_half(total, part, x_sum_ptr, row, valid, block, blocks, scale, zero, 0, KIND)
            part = tl.zeros((BM, BN), tl.float32)
        if WIDTH < BK:
            x = _inputs(
                x_ptr, row, valid, x_row, block, 1, group, blocks_per_group, KIND, COMPUTE, BK, WIDTH, WHOLE
            )  # fmt: skip
            part = _add_product(x, other_w, zero, part, COMPUTE, INTEGER, ASYMMETRIC)
        if FINE:
            total = _add_half(total, part, x_sum_ptr, row, valid, block, blocks, scale, zero, 1, KIND)
        elif GROUPED:
            if INTEGER:  # the sums are of whole groups
                counted = valid & (block == own * blocks_per_group)
                part = _less_zeros(part, x_sum_ptr, row, counted, groups, own, zero, KIND, ASYMMETRIC)
            total += part.to(tl.float32) * scale.to(tl.float32)[None, :]
        else:
            product = part
        scale, zero = next_scale, next_zero
    if not GROUPED:
        if INTEGER:  # the sums are of whole rows
            counted = valid & (first == 0)
            product = _less_zeros(product, x_sum_ptr, row, counted, groups, 0, zero, KIND, ASYMMETRIC)
        total = product.to(tl.float32) * scale.to(tl.float32)[None, :]
    total = total * UNIT
    if SCALED:
        total = total * tl.load(x_scale_ptr + row, mask=valid, other=0.0)[:, None]
    into = out_ptr + tl.program_id(2).to(tl.int64) * out_split + row[:, None] * outputs + output[None, :]
    mask = valid[:, None] & (output < outputs)[None, :]
    tl.store(into, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_parts_kernel(parts_ptr, out_ptr, count, splits, WIDTH: tl.constexpr):
    """Store the sum of parts [splits, count] in out [count], always adding in the same order."""
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    mask = at < count
    total = tl.load(parts_ptr + at, mask=mask, other=0.0)
    for split in range(1, splits):
        total += tl.load(parts_ptr + tl.cast(split, tl.int64) * count + at, mask=mask, other=0.0)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def quantize_kernel(
    x_ptr, codes_ptr, scale_ptr, x_row, inputs,
    FP8: tl.constexpr, BYTES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Quantize inputs, bit-identical to linear/reference.py. Grid: rows. FP8: E4M3, as bytes or values."""
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
            values, bits = e4m3(y)
            codes = bits if BYTES else values
        else:
            codes = (y + 12582912.0) - 12582912.0  # to nearest, ties to even: the last bit is 1
        tl.store(codes_ptr + row * inputs + start + col, codes.to(codes_ptr.dtype.element_ty), mask=mask)


@triton.jit
def dequantize_kernel(
    w_ptr, scale_ptr, zero_ptr, out_ptr, w_rows, first_tile, outputs, padded, group, blocks_per_group,
    out_row,
    KIND: tl.constexpr, COMPUTE: tl.constexpr, UNIT: tl.constexpr, BK: tl.constexpr, WIDTH: tl.constexpr,
    RUNS: tl.constexpr, BN: tl.constexpr, WARPS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Store weights [outputs from `first_tile` on, inputs]. Grid: (blocks of inputs, tiles of outputs)."""
    block, tile = tl.program_id(0), first_tile + tl.program_id(1)
    output = columns(tile * BN, BN, RUNS, WARPS)
    scale, zero = _scales(scale_ptr, zero_ptr, block, blocks_per_group, padded, output, KIND)
    row = (output - first_tile * BN).to(tl.int64)
    w, other_w = weight_tile(w_ptr, block, tile, w_rows, KIND, COMPUTE, WIDTH, BN, RUNS, WARPS)
    for part in tl.static_range(BK // WIDTH):
        column, inside = _input_columns(block, part, group, blocks_per_group, BK, WIDTH, WHOLE)
        values = (w if part == 0 else other_w).to(tl.float32)
        own = scale
        if KIND >= Q4_K:
            own, minimum = half_scales(scale, zero, part, KIND)
        elif zero_ptr is not None:
            values = values - zero.to(tl.float32)[None, :]
        values = values * (own.to(tl.float32) * UNIT)[None, :]
        if KIND == Q4_K:
            values = values - minimum[None, :]
        mask = (output < outputs)[:, None] & inside[None, :]
        into = out_ptr + row[:, None] * out_row + column[None, :]
        tl.store(into, tl.trans(values).to(out_ptr.dtype.element_ty), mask=mask)
