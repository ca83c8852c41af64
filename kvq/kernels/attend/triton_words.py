"""Attention over FP8, INT8 and INT4 rows in Triton, read as words of two bytes (see gpu/words.py).

A row is read in runs: all of FP8 and INT8 rows, and of INT4 rows the bytes of one group in each half. Every
run gives two parts, or four of INT4, each with a product of its own: K's are summed, V's are columns of the
output that lie apart until the end. Codes are never scaled: what scales them goes to scores and probabilities.
"""

import triton
import triton.language as tl

from kvq.kernels.gpu.rows import INT4, scale_and_minimum
from kvq.kernels.gpu.words import high_unit, low_unit, word_parts

# Scaled probabilities are made larger by it where they are fp16: scales are small numbers.
_ENLARGED = tl.constexpr(16.0)


@triton.jit
def folded(x, FOLDED: tl.constexpr):
    """Sums over every FOLDED-th key of x fp32 [rows, keys], fp32 [rows, FOLDED]: each thread adds its own."""
    return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // FOLDED, FOLDED)), axis=1)


@triton.jit
def dot(a, b):
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def added_dot(a, b, c):
    return tl.dot(a, b, c, input_precision="ieee")


@triton.jit
def _every_other(x, START: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Columns START, START + 2, ... of x [ROWS, PAD], COUNT of them, as [ROWS, WIDTH], padded with zeros."""
    col = tl.arange(0, WIDTH)[None, :] + tl.zeros((x.shape[0], 1), tl.int32)
    picked = tl.gather(x, tl.minimum(START + 2 * col, x.shape[1] - 1), axis=1)
    return tl.where(col < COUNT, picked, 0.0)


@triton.jit
def word_queries(
    q, KIND: tl.constexpr, DIM: tl.constexpr, RUN: tl.constexpr, WIDTH: tl.constexpr
):
    """Queries [ROWS, PAD] as the parts of K's runs, and of INT4 the sums of each half of a run, fp32 [ROWS]."""
    parts = ()
    sums = ()
    if KIND == INT4:
        for j in tl.static_range(DIM // 2 // RUN):
            low, high = j * RUN, DIM // 2 + j * RUN
            a, b = _every_other(q, low, RUN // 2, WIDTH), _every_other(q, high, RUN // 2, WIDTH)
            c, d = _every_other(q, low + 1, RUN // 2, WIDTH), _every_other(q, high + 1, RUN // 2, WIDTH)
            parts = parts + (a, b, c, d)
            sums = sums + (
                tl.sum(a.to(tl.float32) + c.to(tl.float32), axis=1),
                tl.sum(b.to(tl.float32) + d.to(tl.float32), axis=1),
            )
    else:
        parts = (_every_other(q, 0, DIM // 2, WIDTH), _every_other(q, 1, DIM // 2, WIDTH))
    return parts, sums


@triton.jit
def _run_of_words(
    codes, at, inside, START: tl.constexpr, RUN: tl.constexpr, WIDTH: tl.constexpr
):
    """The words of bytes [START, START + RUN) of every row, int16 [keys, WIDTH]."""
    col = tl.arange(0, WIDTH)
    mask = inside[:, None] & (col < RUN // 2)[None, :]
    return tl.load(codes + (at[:, None] + (START // 2 + col)[None, :]), mask=mask, other=0)


@triton.jit
def _group(scales, at, inside, GROUP_INDEX: tl.constexpr):
    """Scale and minimum of one group of those tokens, fp32 [keys]."""
    return scale_and_minimum(tl.load(scales + (at + GROUP_INDEX), mask=inside, other=0))


@triton.jit
def _int4_run_scores(
    q, sums, parts, scales, at, inside,
    J: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """What run J of INT4 rows, of the groups FIRST and SECOND, adds to the scores."""
    low = added_dot(q[4 * J + 2], tl.trans(parts[2]), dot(q[4 * J], tl.trans(parts[0])))
    high = added_dot(q[4 * J + 3], tl.trans(parts[3]), dot(q[4 * J + 1], tl.trans(parts[1])))
    LOW: tl.constexpr = low_unit(INT4, COMPUTE)
    HIGH: tl.constexpr = high_unit(INT4, COMPUTE)
    scale, minimum = _group(scales, at, inside, FIRST)
    if FIRST == SECOND:  # one group for the whole row
        both = low * LOW + high * HIGH
        added = both * scale[None, :] + (sums[2 * J] + sums[2 * J + 1])[:, None] * minimum[None, :]
    else:
        added = low * (scale * LOW)[None, :] + sums[2 * J][:, None] * minimum[None, :]
        scale, minimum = _group(scales, at, inside, SECOND)
        added += high * (scale * HIGH)[None, :] + sums[2 * J + 1][:, None] * minimum[None, :]
    return added


@triton.jit
def int4_scores(
    q, sums, codes, scales, codes_at, scales_at, inside,
    DIM: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, WIDTH: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """q . k of one tile, fp32 [rows, keys]: partial products of every group, then its scale and minimum."""
    total = tl.zeros((q[0].shape[0], inside.shape[0]), tl.float32)
    for j in tl.static_range(DIM // 2 // RUN):
        words = _run_of_words(codes, codes_at, inside, j * RUN, RUN, WIDTH)
        parts = word_parts(words, INT4, COMPUTE)
        total += _int4_run_scores(
            q, sums, parts, scales, scales_at, inside,
            j, j * RUN // GROUP, (DIM // 2 + j * RUN) // GROUP, COMPUTE,
        )  # fmt: skip
    return total


@triton.jit
def byte_scores(
    q, codes, codes_at, inside, KIND: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """q . k of one tile of FP8 or INT8 rows, fp32 [rows, keys], to be multiplied by scale and `low_unit`."""
    parts = word_parts(_run_of_words(codes, codes_at, inside, 0, DIM, WIDTH), KIND, COMPUTE)
    return added_dot(q[1], tl.trans(parts[1]), dot(q[0], tl.trans(parts[0])))


@triton.jit
def _weights(p, scale, COMPUTE: tl.constexpr):
    """Probabilities times a scale [keys] as COMPUTE numbers, enlarged."""
    if COMPUTE == tl.float16:
        scale = scale * _ENLARGED
    return (p * scale[None, :]).to(COMPUTE)


@triton.jit
def word_outputs(
    nothing, ROWS: tl.constexpr, KIND: tl.constexpr, DIM: tl.constexpr, RUN: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """The parts of an output of zeros, [ROWS, WIDTH] each. INT4 runs have four, then what minimums add to the
    low and the high half, summed over the keys at the end: `nothing`, zeros [ROWS, FOLDED].
    """
    run = tl.zeros((ROWS, WIDTH), tl.float32)
    outs = ()
    if KIND == INT4:
        for _ in tl.static_range(DIM // 2 // RUN):
            outs = outs + (run, run, run, run, nothing, nothing)
    else:
        outs = (run, run)
    return outs


@triton.jit
def _int4_run_values(
    outs, p, decay, parts, scales, at, inside,
    J: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Run J of the output, of the groups FIRST and SECOND, with one tile taken in."""
    low_added, high_added = outs[6 * J + 4], outs[6 * J + 5]
    decay = decay[:, None]
    scale, minimum = _group(scales, at, inside, FIRST)
    weights = _weights(p, scale, COMPUTE)
    low_added = low_added * decay + folded(p * minimum[None, :], low_added.shape[1])
    a = added_dot(weights, parts[0], outs[6 * J] * decay)
    c = added_dot(weights, parts[2], outs[6 * J + 2] * decay)
    if FIRST != SECOND:  # else both halves are one group, and `low_added` serves both
        scale, minimum = _group(scales, at, inside, SECOND)
        weights = _weights(p, scale, COMPUTE)
        high_added = high_added * decay + folded(p * minimum[None, :], low_added.shape[1])
    b = added_dot(weights, parts[1], outs[6 * J + 1] * decay)
    d = added_dot(weights, parts[3], outs[6 * J + 3] * decay)
    return a, b, c, d, low_added, high_added


@triton.jit
def add_int4_values(
    outs, p, decay, codes, scales, codes_at, scales_at, inside,
    DIM: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, WIDTH: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Let the parts of the output take in one tile of INT4 rows."""
    new = ()
    for j in tl.static_range(DIM // 2 // RUN):
        words = _run_of_words(codes, codes_at, inside, j * RUN, RUN, WIDTH)
        parts = word_parts(words, INT4, COMPUTE)
        new = new + _int4_run_values(
            outs, p, decay, parts, scales, scales_at, inside,
            j, j * RUN // GROUP, (DIM // 2 + j * RUN) // GROUP, COMPUTE,
        )  # fmt: skip
    return new


@triton.jit
def add_byte_values(
    outs, p, decay, codes, scale, codes_at, inside,
    KIND: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Let the parts of the output take in one tile of FP8 or INT8 rows; `scale`: fp32 [keys]."""
    parts = word_parts(_run_of_words(codes, codes_at, inside, 0, DIM, WIDTH), KIND, COMPUTE)
    weights = _weights(p, scale, COMPUTE)
    even = added_dot(weights, parts[0], outs[0] * decay[:, None])
    odd = added_dot(weights, parts[1], outs[1] * decay[:, None])
    return even, odd


@triton.jit
def _placed(out, part, col, START: tl.constexpr, COUNT: tl.constexpr):
    """`out` with the columns START, START + 2, ..., COUNT of them, taken from `part`."""
    own = (col >= START) & (col < START + 2 * COUNT) & ((col - START) % 2 == 0)
    at = tl.minimum(tl.maximum(col - START, 0) // 2, part.shape[1] - 1)
    return tl.where(own, tl.gather(part, at, axis=1), out)


@triton.jit
def joined(
    outs, KIND: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """The output [ROWS, PAD] of its parts."""
    ROWS: tl.constexpr = outs[0].shape[0]
    col = tl.arange(0, PAD)[None, :] + tl.zeros((ROWS, 1), tl.int32)
    out = tl.zeros((ROWS, PAD), tl.float32)
    ENLARGED: tl.constexpr = _ENLARGED if COMPUTE == tl.float16 else 1.0
    LOW: tl.constexpr = low_unit(KIND, COMPUTE) / ENLARGED
    HIGH: tl.constexpr = high_unit(KIND, COMPUTE) / ENLARGED
    if KIND == INT4:
        for j in tl.static_range(DIM // 2 // RUN):
            low = tl.sum(outs[6 * j + 4], axis=1)[:, None]
            high = low
            if GROUP != DIM:
                high = tl.sum(outs[6 * j + 5], axis=1)[:, None]
            out = _placed(out, outs[6 * j] * LOW + low, col, j * RUN, RUN // 2)
            out = _placed(out, outs[6 * j + 2] * LOW + low, col, j * RUN + 1, RUN // 2)
            out = _placed(out, outs[6 * j + 1] * HIGH + high, col, DIM // 2 + j * RUN, RUN // 2)
            out = _placed(out, outs[6 * j + 3] * HIGH + high, col, DIM // 2 + j * RUN + 1, RUN // 2)
    else:
        out = _placed(out, outs[0] * LOW, col, 0, DIM // 2)
        out = _placed(out, outs[1] * LOW, col, 1, DIM // 2)
    return out
