"""INT4 rows in Triton attention: read as runs of one group in each half, so that one load of packed
bytes gives two of them; a partial product per run, then its group's scale and minimum.
"""

import triton
import triton.language as tl

from kvq.kernels.gpu.rows import nibbles, scale_and_minimum


@triton.jit
def dot(a, b):
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _query_run(x, start, WIDTH: tl.constexpr, RUN: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr):
    """Columns [start, start + RUN) of x [ROWS, PAD] as [ROWS, WIDTH], padded with zeros."""
    col = tl.arange(0, WIDTH)[None, :] + tl.zeros((ROWS, 1), tl.int32)
    picked = tl.gather(x, tl.minimum(start + col, PAD - 1), axis=1)
    return tl.where(col < RUN, picked, 0.0)


@triton.jit
def _group(scales, at, inside, GROUP_INDEX: tl.constexpr, UNIT: tl.constexpr):
    """Scale, for codes divided by UNIT, and minimum of one group of those tokens, fp32 [keys]."""
    scale, minimum = scale_and_minimum(tl.load(scales + at + GROUP_INDEX, mask=inside, other=0))
    return scale * UNIT, minimum


@triton.jit
def _run_scores(
    low_q, high_q, low_sum, high_sum, low, high, scales, at, inside,
    FIRST: tl.constexpr, SECOND: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """What two runs of codes, of the groups FIRST and SECOND, add to the scores."""
    scale, minimum = _group(scales, at, inside, FIRST, UNIT)
    low_part = dot(low_q, tl.trans(low))
    high_part = dot(high_q, tl.trans(high))
    if FIRST == SECOND:  # one group for the whole row
        part = (low_part + high_part) * scale[None, :] + (low_sum + high_sum)[:, None] * minimum[None, :]
    else:
        part = low_part * scale[None, :] + low_sum[:, None] * minimum[None, :]
        scale, minimum = _group(scales, at, inside, SECOND, UNIT)
        part += high_part * scale[None, :] + high_sum[:, None] * minimum[None, :]
    return part


@triton.jit
def int4_scores(
    low_q, high_q, low_sum, high_sum, codes, scales, codes_at, scales_at, inside,
    DIM: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, WIDTH: tl.constexpr,
    COMPUTE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """q . k of one tile, fp32 [rows, keys]: a partial product per group, then its scale and minimum."""
    col = tl.arange(0, WIDTH)
    mask = inside[:, None] & (col < RUN)[None, :]
    total = tl.zeros((low_q[0].shape[0], codes_at.shape[0]), tl.float32)
    for j in tl.static_range(DIM // 2 // RUN):
        packed = tl.load(codes + codes_at[:, None] + (j * RUN + col)[None, :], mask=mask, other=0)
        low, high = nibbles(packed, COMPUTE, 0)
        total += _run_scores(
            low_q[j], high_q[j], low_sum[j], high_sum[j], low, high, scales, scales_at, inside,
            j * RUN // GROUP, (DIM // 2 + j * RUN) // GROUP, UNIT,
        )  # fmt: skip
    return total


@triton.jit
def _weighted(
    p, added, decay, scales, at, inside, GROUP_INDEX: tl.constexpr, COMPUTE: tl.constexpr, UNIT: tl.constexpr
):
    """Probabilities times one group's scale, and `added`, fp32 [rows, keys], whose sum over keys is what
    minimums give to every element of the group: it is summed once, at the end."""
    scale, minimum = _group(scales, at, inside, GROUP_INDEX, UNIT)
    return (p * scale[None, :]).to(COMPUTE), added * decay[:, None] + p * minimum[None, :]


@triton.jit
def _run_values(
    low_out, high_out, low_added, high_added, p, decay, low, high, scales, at, inside,
    FIRST: tl.constexpr, SECOND: tl.constexpr, COMPUTE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Two runs of the output, of the groups FIRST and SECOND, with one tile taken in."""
    scaled, low_added = _weighted(p, low_added, decay, scales, at, inside, FIRST, COMPUTE, UNIT)
    low_out = low_out * decay[:, None] + dot(scaled, low)
    if FIRST != SECOND:  # else both halves are one group, and `low_added` serves both
        scaled, high_added = _weighted(p, high_added, decay, scales, at, inside, SECOND, COMPUTE, UNIT)
    high_out = high_out * decay[:, None] + dot(scaled, high)
    return low_out, high_out, low_added, high_added


@triton.jit
def add_int4_values(
    outs, p, decay, codes, scales, codes_at, scales_at, inside,
    DIM: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, WIDTH: tl.constexpr,
    COMPUTE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Let the runs of the output, (low, high, low_added, high_added) each, take one tile in."""
    col = tl.arange(0, WIDTH)
    mask = inside[:, None] & (col < RUN)[None, :]
    new = ()
    for j in tl.static_range(DIM // 2 // RUN):
        packed = tl.load(codes + codes_at[:, None] + (j * RUN + col)[None, :], mask=mask, other=0)
        low, high = nibbles(packed, COMPUTE, 0)
        new = new + _run_values(
            outs[4 * j], outs[4 * j + 1], outs[4 * j + 2], outs[4 * j + 3], p, decay, low, high,
            scales, scales_at, inside,
            j * RUN // GROUP, (DIM // 2 + j * RUN) // GROUP, COMPUTE, UNIT,
        )  # fmt: skip
    return new


@triton.jit
def _placed(out, run, col, START: tl.constexpr, RUN: tl.constexpr, WIDTH: tl.constexpr):
    """`out` with the columns [START, START + RUN) taken from `run`."""
    own = (col >= START) & (col < START + RUN)
    at = tl.minimum(tl.maximum(col - START, 0), WIDTH - 1)
    return tl.where(own, tl.gather(run, at, axis=1), out)


@triton.jit
def joined(
    outs, ROWS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, GROUP: tl.constexpr,
    RUN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The runs of an int4 output as one row each, fp32 [ROWS, PAD]."""
    col = tl.arange(0, PAD)[None, :] + tl.zeros((ROWS, 1), tl.int32)
    out = tl.zeros((ROWS, PAD), tl.float32)
    for j in tl.static_range(DIM // 2 // RUN):
        added = tl.sum(outs[4 * j + 2], axis=1)[:, None]
        out = _placed(out, outs[4 * j] + added, col, j * RUN, RUN, WIDTH)
        if GROUP != DIM:
            added = tl.sum(outs[4 * j + 3], axis=1)[:, None]
        out = _placed(out, outs[4 * j + 1] + added, col, DIM // 2 + j * RUN, RUN, WIDTH)
    return out


@triton.jit
def int4_queries(
    q, ROWS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, RUN: tl.constexpr, WIDTH: tl.constexpr
):
    """Queries [ROWS, PAD] by runs: those of the low halves, of the high ones, and the sums of both."""
    low_q = ()
    high_q = ()
    low_sum = ()
    high_sum = ()
    for j in tl.static_range(DIM // 2 // RUN):
        low = _query_run(q, j * RUN, WIDTH, RUN, PAD, ROWS)
        high = _query_run(q, DIM // 2 + j * RUN, WIDTH, RUN, PAD, ROWS)
        low_q, high_q = low_q + (low,), high_q + (high,)
        low_sum = low_sum + (tl.sum(low.to(tl.float32), axis=1),)
        high_sum = high_sum + (tl.sum(high.to(tl.float32), axis=1),)
    return low_q, high_q, low_sum, high_sum
