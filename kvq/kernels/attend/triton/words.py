"""Attention scores in Triton for FP8, INT8 and packed rows, read as two-byte words (see gpu/words.py).

A row is read in runs. FP8 and INT8 rows are one run. In the first plane of packed rows, a run has the bytes
of one group in each half or, with pairs of bits, in each quarter. A run has two parts (four for nibbles,
eight for bit pairs), each with its own product; values.py does the same for V. Scores are scaled; codes never
are.

FP8 and INT8 rows can also be multiplied directly, with queries rounded to the same code: each query row has
one scale, its largest element divided by the largest code. INT8 products are summed exactly, FP8 products in
the tensor core's fp32.
"""

import triton
import triton.language as tl

from kvq.kernels.attend.triton.scales import (
    group_minimums,
    group_words,
    is_narrow,
    runs_of,
    side_by_side,
    wide_scale,
)
from kvq.kernels.gpu.rows import FP8, INT4, INT8, INTERPRETED, e4m3, fp8_codes
from kvq.kernels.gpu.words import (
    code_bits,
    codes_a_byte,
    exponent,
    high_bits,
    high_bytes,
    high_place,
    high_start,
    settled,
    unit,
    word_parts,
)

LEAST_COLUMNS = tl.constexpr(8)  # of a product
LEAST_KEYS = tl.constexpr(16)  # that a product sums over
_LEAST = tl.constexpr(1e-30)  # minimum value used for a row's largest element: its inverse must be finite
_TO_WHOLE = tl.constexpr(12582912.0)  # added to a small number, leaves it rounded to even in the low bits


@triton.jit
def folded(x, FOLDED: tl.constexpr):
    """Sum x, fp32 [rows, keys], over every FOLDED-th key: fp32 [rows, FOLDED]. A thread sums its own keys."""
    return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // FOLDED, FOLDED)), axis=1)


@triton.jit
def dot(a, b):
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def added_dot(a, b, c):
    return tl.dot(a, b, c, input_precision="ieee")


@triton.jit
def _every_other(x, START: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Return COUNT columns of x [ROWS, PAD], START, START + 2, ..., padded with zeros to [ROWS, WIDTH]."""
    col = tl.arange(0, WIDTH)[None, :] + tl.zeros((x.shape[0], 1), tl.int32)
    picked = tl.gather(x, tl.minimum(START + 2 * col, x.shape[1] - 1), axis=1)
    return tl.where(col < COUNT, picked, 0.0)


@triton.jit
def _in_column(out, x, COLUMN: tl.constexpr):
    """Add the sums of x's rows to one column of `out` [ROWS, PAIRS]."""
    return out + tl.where(tl.arange(0, out.shape[1])[None, :] == COLUMN, tl.sum(x, axis=1)[:, None], 0.0)


# D124: words of 16 bits: even and odd bytes apart
@triton.jit
def even_and_odd(q, HALVES: tl.constexpr, RUNS: tl.constexpr, RUN: tl.constexpr, WIDTH: tl.constexpr):
    """Split queries [ROWS, PAD] to match words: the even columns of each of HALVES * RUNS runs, then the odd
    columns, each [ROWS, WIDTH], padded with zeros.
    """
    if RUN == 2 * WIDTH and q.shape[1] == HALVES * RUNS * RUN:
        even, odd = tl.split(tl.reshape(q, (q.shape[0], q.shape[1] // 2, 2)))
        cut = runs_of(even, HALVES * RUNS) + runs_of(odd, HALVES * RUNS)
        parts = ()
        for i in tl.static_range(2 * HALVES * RUNS):
            parts = parts + (settled(cut[i]),)
    else:
        parts = ()
        for odd in tl.static_range(2):
            for i in tl.static_range(HALVES * RUNS):
                parts = parts + (_every_other(q, i * RUN + odd, RUN // 2, WIDTH),)
    return parts


@triton.jit
def word_queries(
    q, KIND: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Return queries [ROWS, PAD] as the parts of K's runs and, for packed codes, the factors of minimums.
    STEP: number of columns per group in `group_minimums`; the last one is the group's minimum."""
    parts = ()
    sums = ()
    if KIND >= INT4:
        PER: tl.constexpr = codes_a_byte(KIND)
        RUNS: tl.constexpr = DIM // PER // RUN
        cut = even_and_odd(q, PER, RUNS, RUN, WIDTH)
        total = tl.zeros((q.shape[0], PAIRS), tl.float32)
        for j in tl.static_range(RUNS):
            for i in tl.static_range(2 * PER):
                parts = parts + (cut[i * RUNS + j],)
            for i in tl.static_range(PER):
                both = cut[i * RUNS + j].to(tl.float32) + cut[(PER + i) * RUNS + j].to(tl.float32)
                total = _in_column(total, both, STEP * ((i * (DIM // PER) + j * RUN) // GROUP) + STEP - 1)
        coarse = total.to(q.dtype)
        sums = (coarse, (total - coarse.to(tl.float32)).to(q.dtype))
        if STEP == 1:
            sums = (side_by_side(sums[0], sums[1]),)
    else:
        parts = even_and_odd(q, 1, 1, RUN, WIDTH)
    return parts, sums


@triton.jit
def run_of_words(codes, at, inside, START: tl.constexpr, RUN: tl.constexpr, WIDTH: tl.constexpr):
    """Load bytes [START, START + RUN) of every row as words, int16 [keys, WIDTH]."""
    col = tl.arange(0, WIDTH)
    mask = inside[:, None] & (col < RUN // 2)[None, :]
    return tl.load(codes + (at[:, None] + (START // 2 + col)[None, :]), mask=mask, other=0)


@triton.jit
def _high_words(
    codes, at, inside, START: tl.constexpr, SIZE: tl.constexpr, RUN: tl.constexpr, WIDTH: tl.constexpr
):
    """Load the second plane's words for runs of the first plane: SIZE bytes from START on, repeated.

    Each repetition is a separate tile, int16 [keys, WIDTH], with zeros in the columns of the other tiles.
    """
    col = tl.arange(0, WIDTH)
    words = codes + (at[:, None] + (col % (SIZE // 2) + START // 2)[None, :])
    high = ()
    for i in tl.static_range(RUN // SIZE):
        own = (col >= i * SIZE // 2) & (col < (i + 1) * SIZE // 2)
        high = high + (tl.load(words, mask=inside[:, None] & own[None, :], other=0),)
    return high


@triton.jit
def run_parts(
    codes, at, inside, KIND: tl.constexpr, START: tl.constexpr, DIM: tl.constexpr, RUN: tl.constexpr,
    WIDTH: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Return the parts of bytes [START, START + RUN) in packed rows' first plane, [keys, WIDTH] each."""
    high = ()
    if high_bits(KIND) > 0:
        SIZE: tl.constexpr = min(RUN, high_bytes(KIND, DIM))
        high = _high_words(codes, at, inside, high_start(KIND, START, DIM), SIZE, RUN, WIDTH)
    words = run_of_words(codes, at, inside, START, RUN, WIDTH)
    return word_parts(words, high, KIND, COMPUTE, high_place(KIND, START, DIM))


@triton.jit
def _columns(x):
    """Return keys [keys, elements] as columns; a single key is repeated."""
    if x.shape[0] == 1:
        x = tl.broadcast_to(x, (LEAST_COLUMNS, x.shape[1]))
    return tl.trans(x)


@triton.jit
def packed_scores(
    q, sums, before, codes, scales, codes_at, scales_at, inside,
    KIND: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr, COMPUTE: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """Return q . k for one tile, fp32 [rows, keys], plus `before`: the sum of each group's partial products
    times its scale, and of one product of the queries' sums with all minimums. Queries' sums are split into
    two numbers, so that nothing is rounded. A single key is repeated in LEAST_COLUMNS columns."""
    PER: tl.constexpr = codes_a_byte(KIND)
    RUNS: tl.constexpr = DIM // PER // RUN
    pairs = group_minimums(scales, scales_at, inside, DIM // GROUP, PAIRS, COMPUTE, code_bits(KIND))
    if is_narrow(scales):
        total = added_dot(sums[0], _columns(side_by_side(pairs, pairs)), before)
    else:
        pairs = tl.trans(pairs)
        total = added_dot(sums[0], pairs, added_dot(sums[1], pairs, before))
    groups = group_words(scales, scales_at, inside, DIM // GROUP, SPREAD)
    products = ()
    for j in tl.static_range(RUNS):
        parts = run_parts(codes, codes_at, inside, KIND, j * RUN, DIM, RUN, WIDTH, COMPUTE)
        own = ()
        for i in tl.static_range(PER):
            even = _columns(parts[i])
            if j * RUN % GROUP == 0:
                product = dot(q[2 * PER * j + i], even)
            else:
                product = added_dot(q[2 * PER * j + i], even, products[i])
            own = own + (added_dot(q[2 * PER * j + PER + i], _columns(parts[PER + i]), product),)
        products = own
        if (j + 1) * RUN % GROUP == 0 or j + 1 == RUNS:
            for i in tl.static_range(PER):
                scale = wide_scale(
                    groups, (i * (DIM // PER) + j * RUN) // GROUP, exponent(unit(KIND, COMPUTE, i))
                )
                total += products[i] * scale[None, :]
    return total


@triton.jit
def byte_parts(rows, tile):
    """Return FP8 or INT8 rows as two parts: the even bytes and the odd bytes."""
    words = run_of_words(tile.codes, tile.codes_at, tile.inside, 0, rows.dim, rows.read.width)
    KIND: tl.constexpr = FP8 if rows.kind == FP8 else INT8  # or CHANNEL_INT8
    return word_parts(words, (), KIND, rows.read.compute, 0)


@triton.jit
def byte_scores(q, k, tile):
    """Return q . k for a tile of FP8 or INT8 rows, fp32 [rows, keys], without the scales and `low_unit`."""
    parts = byte_parts(k, tile)
    return added_dot(q[1], tl.trans(parts[1]), dot(q[0], tl.trans(parts[0])))


@triton.jit
def rounded_queries(y, KIND: tl.constexpr):
    """Round fp32 [rows, columns] to codes of K's kind, with one scale per row, fp32 [rows]; NaN stays NaN."""
    LIMIT: tl.constexpr = 127.0 if KIND == INT8 else 448.0
    top = tl.maximum(tl.max(tl.abs(y), axis=1), _LEAST)
    scale = top / LIMIT
    y = y * (LIMIT / top)[:, None]
    if KIND == INT8:
        codes = (y + _TO_WHOLE).to(tl.int32, bitcast=True).to(tl.int8)
        total = tl.sum(y, axis=1)
        scale = tl.where(total == total, scale, total)
    elif INTERPRETED:
        codes = tl.where(y == y, e4m3(tl.minimum(tl.maximum(y, -LIMIT), LIMIT))[0], y)
    else:
        codes = y.to(tl.float8e4nv)
    return codes, scale


@triton.jit
def rounded_scores(q, k, tile):
    """Return q . k for one tile, fp32 [rows, keys], without either scale; `q`: from `rounded_queries`."""
    col = tl.arange(0, q.shape[1])
    mask = tile.inside[:, None] & (col < k.dim)[None, :]
    codes = tl.load(tile.codes + (tile.codes_at[:, None] + col[None, :]), mask=mask, other=0.0)
    if k.kind == INT8:
        scores = tl.dot(q, tl.trans(codes), out_dtype=tl.int32).to(tl.float32)
    elif INTERPRETED:
        scores = tl.dot(q, tl.trans(fp8_codes(codes, tl.float32) * 256.0), input_precision="ieee")
    else:
        scores = tl.dot(q, tl.trans(codes))
    return scores
