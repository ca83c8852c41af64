"""Attention over values in FP8, INT8 and packed rows in Triton, read as two-byte words.

The parts of a run (see words.py) are columns of the output that stay separate until the end. Probabilities
are scaled; codes never are.
"""

import triton
import triton.language as tl

from kvq.kernels.attend.triton.means import MEANS_TOGETHER, mean_of_values, mean_run, means_at, words_of_means
from kvq.kernels.attend.triton.scales import group_minimums, group_words, half_scale, scaled, side_by_side
from kvq.kernels.attend.triton.words import LEAST_COLUMNS, added_dot, byte_parts, dot, run_parts
from kvq.kernels.gpu.rows import INT4
from kvq.kernels.gpu.words import code_bits, codes_a_byte, unit


@triton.jit
def _interleaved(even, odd):
    """Interleave the columns of two tensors."""
    return tl.reshape(tl.join(even, odd), (even.shape[0], 2 * even.shape[1]))


@triton.jit
def word_outputs(
    ROWS: tl.constexpr, KIND: tl.constexpr, DIM: tl.constexpr, RUN: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Return the parts of an output, zeros [ROWS, WIDTH] each.

    For packed codes, they are preceded by a part [ROWS, PAIRS] for the products with minimums.
    """
    run = tl.zeros((ROWS, WIDTH), tl.float32)
    outs = (run, run)
    if KIND >= INT4:
        outs = (tl.zeros((ROWS, PAIRS), tl.float32),)
        for _ in tl.static_range(2 * (DIM // RUN)):
            outs = outs + (run,)
    return outs


@triton.jit
def _taken_in(out, decay, weights, values, more):  # D118: INT4 sums are added to nearest: Hopper truncates
    """Return `out` times `decay`, plus `more`, plus the products of one tile, rounded to nearest.

    Tensor cores truncate when they add to a sum. Packed codes are never negative, so adding to `out` within
    the product would make every column too small by the same amount: by 1.5% of a result for 34,816 keys, all
    of it in one column if V was rotated.
    """
    return tl.fma(out, tl.broadcast_to(decay[:, None], out.shape), added_dot(weights, values, more))


@triton.jit
def add_packed_values(
    outs, p, decay, codes, scales, codes_at, scales_at, inside,
    KIND: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr, COMPUTE: tl.constexpr, SPREAD: tl.constexpr, means, means_at,
    MEAN_GROUP: tl.constexpr,
):  # fmt: skip
    """Add one tile of packed rows and, with means, the mean of its block, to the parts of the output."""
    PER: tl.constexpr = codes_a_byte(KIND)
    pairs = group_minimums(scales, scales_at, inside, DIM // GROUP, PAIRS, COMPUTE, code_bits(KIND))
    weights = p.to(COMPUTE)
    mean = mean_of_values(p, means, means_at, DIM, MEAN_GROUP, PAIRS, COMPUTE)
    more = tl.zeros(outs[0].shape, tl.float32) if MEAN_GROUP == 0 else dot(mean[0], mean[1])
    new = (_taken_in(outs[0], decay, weights, pairs, more),)
    groups = group_words(scales, scales_at, inside, DIM // GROUP, SPREAD)
    for j in tl.static_range(DIM // PER // RUN):
        parts = run_parts(codes, codes_at, inside, KIND, j * RUN, DIM, RUN, WIDTH, COMPUTE)
        more = ()
        if MEAN_GROUP == 0:
            for _ in tl.static_range(2 * PER):
                more = more + (tl.zeros(outs[1].shape, tl.float32),)
        else:
            more = mean_run(mean, means, means_at, j, DIM, MEAN_GROUP, RUN, WIDTH, COMPUTE)
        own = ()
        for i in tl.static_range(PER):
            scale = half_scale(groups, (i * (DIM // PER) + j * RUN) // GROUP, COMPUTE)
            own = own + (scaled(weights, scale),)
        own = own + own  # for even bytes and odd ones
        for i in tl.static_range(2 * PER):
            new = new + (_taken_in(outs[2 * PER * j + i + 1], decay, own[i], parts[i], more[i]),)
    return new


@triton.jit
def add_byte_values(outs, weights, decay, v, tile):
    """Add one tile of FP8 or INT8 rows to the parts of the output."""
    parts = byte_parts(v, tile)
    even = added_dot(weights, parts[0], outs[0] * decay[:, None])
    odd = added_dot(weights, parts[1], outs[1] * decay[:, None])
    return even, odd


@triton.jit
def _column(x, COLUMN: tl.constexpr):
    """Return one column of x [ROWS, PAIRS] as [ROWS, 1]."""
    own = tl.arange(0, x.shape[1])[None, :] == COLUMN
    return tl.sum(tl.where(own, x, 0.0), axis=1)[:, None]


@triton.jit
def _minimum(x, AT: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, MEAN_GROUP: tl.constexpr):
    """Return the products of a run that begins at AT with the minimums of rows and means, [ROWS, 1]."""
    added = _column(x, STEP * (AT // GROUP) + STEP - 1)
    if MEAN_GROUP > 0:
        added += _column(x, x.shape[1] // 2 + AT // MEAN_GROUP)
    return added


@triton.jit
def joined(
    outs, KIND: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
    COMPUTE: tl.constexpr, STEP: tl.constexpr, MEAN_GROUP: tl.constexpr,
):  # fmt: skip
    """Return the output [ROWS, PAD], assembled from its parts. MEAN_GROUP: group size of means, or 0."""
    SHARE: tl.constexpr = 1 / 32 if KIND >= INT4 and STEP == 1 else 1.0
    PER: tl.constexpr = codes_a_byte(KIND)
    RUNS: tl.constexpr = DIM // PER // RUN
    runs = ()  # as [ROWS, 2 * WIDTH], those of the lowest codes of bytes first
    if KIND >= INT4:
        for i in tl.static_range(PER):
            for j in tl.static_range(RUNS):
                added = _minimum(outs[0], i * (DIM // PER) + j * RUN, GROUP, STEP, MEAN_GROUP)
                even = outs[2 * PER * j + i + 1] * (unit(KIND, COMPUTE, i) * SHARE)
                odd = outs[2 * PER * j + PER + i + 1] * (unit(KIND, COMPUTE, i) * SHARE)
                runs = runs + (_interleaved(even + added, odd + added),)
    else:
        runs = (_interleaved(outs[0] * unit(KIND, COMPUTE, 0), outs[1] * unit(KIND, COMPUTE, 0)),)
    return _runs_together(runs, PER * RUNS, PAD, RUN)


@triton.jit
def _runs_together(runs, COUNT: tl.constexpr, PAD: tl.constexpr, RUN: tl.constexpr):
    """Concatenate the first RUN columns of each of COUNT runs: [ROWS, PAD]."""
    ROWS: tl.constexpr = runs[0].shape[0]
    if runs[0].shape[1] == RUN and COUNT * RUN == PAD:
        out = all_side_by_side(runs, 0, COUNT)
    else:
        col = tl.arange(0, PAD)[None, :] + tl.zeros((ROWS, 1), tl.int32)
        out = tl.zeros((ROWS, PAD), tl.float32)
        for i in tl.static_range(COUNT):
            own = (col >= i * RUN) & (col < (i + 1) * RUN)
            at = tl.minimum(tl.maximum(col - i * RUN, 0), runs[i].shape[1] - 1)
            out = tl.where(own, tl.gather(runs[i], at, axis=1), out)
    return out


@triton.jit
def all_side_by_side(runs, START: tl.constexpr, COUNT: tl.constexpr):
    """Concatenate the columns of COUNT runs; COUNT is a power of two."""
    if COUNT == 1:
        out = runs[START]
    else:
        HALF: tl.constexpr = COUNT // 2
        out = side_by_side(all_side_by_side(runs, START, HALF), all_side_by_side(runs, START + HALF, HALF))
    return out


@triton.jit
def values_of_means(
    v, room, rows_at, top, table, begin, end, means,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Return the block means for keys [begin, end), weighted by the sums of weights, fp32 [ROWS, v.pad].

    `room`: contains, from each row's `rows_at` on, log2 of every tile's sum, from which `top` is subtracted.
    """
    DIM: tl.constexpr = v.dim
    GROUP: tl.constexpr = v.mean_group
    RUN: tl.constexpr = min(GROUP, DIM // 2)  # bytes
    WIDTH: tl.constexpr = RUN // 2
    TILES: tl.constexpr = BLOCK_SIZE // KEYS
    tl.debug_barrier()  # other threads wrote the sums
    outs = word_outputs(ROWS, INT4, DIM, RUN, WIDTH, LEAST_COLUMNS)
    codes, scales, WORDS = words_of_means(means, DIM)
    safe = tl.where(top == float("-inf"), 0.0, top)
    first, last = begin // BLOCK_SIZE, (end + BLOCK_SIZE - 1) // BLOCK_SIZE
    for start in tl.range(first, last, MEANS_TOGETHER, num_stages=1):
        block, inside, at = means_at(table, start, last, v.mean_strides.block)
        weights = tl.zeros((ROWS, MEANS_TOGETHER), tl.float32)
        for i in tl.static_range(TILES):
            tile = block * TILES + i
            own = inside & (tile * KEYS >= begin) & (tile * KEYS < end)
            sums = tl.load(room + (rows_at[:, None] + tile[None, :]), mask=own[None, :], other=float("-inf"))
            weights += tl.exp2(sums - safe[:, None])
        outs = add_packed_values(
            outs, weights, tl.full((ROWS,), 1.0, tl.float32), codes, scales, WORDS * at, at, inside,
            INT4, DIM, GROUP, RUN, WIDTH, LEAST_COLUMNS, v.read.compute, 1, means, at, 0,
        )  # fmt: skip
    return joined(outs, INT4, DIM, v.pad, GROUP, RUN, v.read.compute, 1, 0)
