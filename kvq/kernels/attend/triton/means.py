"""Attention over block means in Triton; means are read in the same way as INT4 rows.

A block's mean acts as one more key, whose score is added to those of all keys in the tile, and as one more
value, weighted by the sum of the weights. For tiles with few rows, the means of all blocks of a program form
separate tiles: their scores are written to memory before the loop over keys; the loop writes the sums of
weights, which are used after it. Rows of any code are thus read as words without additional registers.
"""

import triton
import triton.language as tl

from kvq.kernels.attend.triton.scales import group_minimums, group_words, half_scale, scaled, side_by_side
from kvq.kernels.attend.triton.words import (
    LEAST_COLUMNS,
    LEAST_KEYS,
    dot,
    folded,
    packed_scores,
    run_parts,
    word_queries,
)
from kvq.kernels.gpu.rows import INT4

MEANS_TOGETHER = tl.constexpr(32)  # means per tile


@triton.jit
def means_at(table, first, last, m_block):
    """Return MEANS_TOGETHER blocks from `first` on, a mask of those before `last`, and means' offsets."""
    block = first + tl.arange(0, MEANS_TOGETHER)
    inside = block < last
    return block, inside, tl.load(table + block, mask=inside, other=0).to(tl.int64) * m_block


@triton.jit
def words_of_means(means, DIM: tl.constexpr):
    """Return pointers to the means' codes and scales, and the two-byte words per element of `means`."""
    WORDS: tl.constexpr = means.dtype.element_ty.primitive_bitwidth // 16
    return means.to(tl.pointer_type(tl.int16), bitcast=True), means + DIM // (4 * WORDS), WORDS


@triton.jit
def score_means(q, k, room, rows_at, valid, table, first, last, means):  # D130: around the loop
    """Store q . mean for the blocks [first, last) in `room`, starting at each row's `rows_at`."""
    RUN: tl.constexpr = min(k.mean_group, k.dim // 2)  # bytes
    WIDTH: tl.constexpr = RUN // 2
    runs, sums = word_queries(q, INT4, k.dim, k.mean_group, RUN, WIDTH, LEAST_COLUMNS, 1)
    codes, scales, WORDS = words_of_means(means, k.dim)
    none = tl.zeros((q.shape[0], MEANS_TOGETHER), tl.float32)
    for start in tl.range(first, last, MEANS_TOGETHER, num_stages=1):
        block, inside, at = means_at(table, start, last, k.mean_strides.block)
        scores = packed_scores(
            runs, sums, none, codes, scales, WORDS * at, at, inside,
            INT4, k.dim, k.mean_group, RUN, WIDTH, LEAST_COLUMNS, k.read.compute, 1,
        )  # fmt: skip
        tl.store(room + (rows_at[:, None] + block[None, :]), scores, mask=valid[:, None] & inside[None, :])
    tl.debug_barrier()  # other threads read them


@triton.jit
def mean_scores(q, sums, k, at, KEYS: tl.constexpr, GROUP: tl.constexpr):
    """Return q . mean for a tile's block, fp32 [rows, KEYS], equal for all keys; `at`: offset in words."""
    none = tl.zeros((q[0].shape[0], LEAST_COLUMNS), tl.float32)
    codes = k.means.to(tl.pointer_type(tl.int16), bitcast=True)
    scores = packed_scores(
        q, sums, none, codes, k.means + k.dim // 8, 2 * at, at, tl.arange(0, 1) == 0,
        INT4, k.dim, GROUP, k.read.run, k.read.width, LEAST_COLUMNS, k.read.compute, 1,
    )  # fmt: skip
    shape: tl.constexpr = (q[0].shape[0], KEYS // LEAST_COLUMNS, LEAST_COLUMNS)
    return tl.reshape(tl.broadcast_to(scores[:, None, :], shape), (q[0].shape[0], KEYS))


@triton.jit
def _rows(x):
    """Repeat the only row of x LEAST_KEYS times, the smallest number of rows over which a product can sum."""
    return tl.broadcast_to(x, (LEAST_KEYS, x.shape[1]))


@triton.jit
def mean_of_values(
    p, means, at, DIM: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr, COMPUTE: tl.constexpr
):
    """Return the inputs of `mean_run`, empty without means: sums of weights p, fp32 [rows, keys], over every
    LEAST_KEYS-th key; a mean's minimums, in the second half of the columns; and words of its scales."""
    mean = ()
    if GROUP > 0:
        weights = folded(p, LEAST_KEYS).to(COMPUTE)
        inside = tl.arange(0, 1) == 0
        pairs = group_minimums(means + DIM // 8, at, inside, DIM // GROUP, PAIRS // 2, COMPUTE, 4)
        pairs = side_by_side(tl.zeros(pairs.shape, COMPUTE), pairs)
        mean = (weights, _rows(pairs), group_words(means + DIM // 8, at, inside, DIM // GROUP, 1))
    return mean


@triton.jit
def mean_run(
    mean, means, at, J: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
    WIDTH: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Return the products of weights with one run of a mean, in the same order as for INT4 rows."""
    codes = means.to(tl.pointer_type(tl.int16), bitcast=True)
    inside = tl.arange(0, 1) == 0
    parts = run_parts(codes, 2 * at, inside, INT4, J * RUN, DIM, RUN, WIDTH, COMPUTE)
    low = scaled(mean[0], half_scale(mean[2], J * RUN // GROUP, COMPUTE))
    high = scaled(mean[0], half_scale(mean[2], (DIM // 2 + J * RUN) // GROUP, COMPUTE))
    return (
        dot(low, _rows(parts[0])), dot(high, _rows(parts[1])),
        dot(low, _rows(parts[2])), dot(high, _rows(parts[3])),
    )  # fmt: skip
