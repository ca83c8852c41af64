"""Attention over FP8, INT8, INT4 and INT2 rows in Triton, read as words of two bytes (see gpu/words.py).

A row is read in runs: all of FP8 and INT8 rows, and of packed ones, INT4 and INT2, the bytes of one group in
each half or quarter. Every run gives two parts, or four of INT4 and eight of INT2, each with a product of its
own: K's are summed, V's are columns of the output that lie apart until the end. Codes are never scaled, but
scores and probabilities. A block's mean is one more key, seen by all columns of its tile, and one more value,
times the sum of the weights.
"""

import triton
import triton.language as tl

from kvq.kernels.attend.triton_scales import (
    group_minimums,
    group_words,
    half_scale,
    is_narrow,
    runs_of,
    scaled,
    side_by_side,
    wide_scale,
)
from kvq.kernels.gpu.rows import INT4
from kvq.kernels.gpu.words import codes_a_byte, exponent, settled, unit, word_parts

LEAST_COLUMNS = tl.constexpr(8)  # of a product
LEAST_KEYS = tl.constexpr(16)  # that a product sums over


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
def _in_column(out, x, COLUMN: tl.constexpr):
    """`out` [ROWS, PAIRS] with the sums of x's rows added to one column."""
    return out + tl.where(tl.arange(0, out.shape[1])[None, :] == COLUMN, tl.sum(x, axis=1)[:, None], 0.0)


@triton.jit
def _interleaved(even, odd):
    """The columns of two, taking turns."""
    return tl.reshape(tl.join(even, odd), (even.shape[0], 2 * even.shape[1]))


@triton.jit
def _even_and_odd(q, HALVES: tl.constexpr, RUNS: tl.constexpr, RUN: tl.constexpr, WIDTH: tl.constexpr):
    """Queries [ROWS, PAD] as words have them: the even columns of each of HALVES * RUNS runs, then the odd
    ones, [ROWS, WIDTH], padded with zeros."""
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
    """Queries [ROWS, PAD] as the parts of K's runs, and of INT4 what minimums are multiplied by;
    STEP: columns of a group in `group_minimums`, the last of which is its minimum."""
    parts = ()
    sums = ()
    if KIND >= INT4:
        PER: tl.constexpr = codes_a_byte(KIND)
        RUNS: tl.constexpr = DIM // PER // RUN
        cut = _even_and_odd(q, PER, RUNS, RUN, WIDTH)
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
        parts = _even_and_odd(q, 1, 1, RUN, WIDTH)
    return parts, sums


@triton.jit
def _run_of_words(codes, at, inside, START: tl.constexpr, RUN: tl.constexpr, WIDTH: tl.constexpr):
    """The words of bytes [START, START + RUN) of every row, int16 [keys, WIDTH]."""
    col = tl.arange(0, WIDTH)
    mask = inside[:, None] & (col < RUN // 2)[None, :]
    return tl.load(codes + (at[:, None] + (START // 2 + col)[None, :]), mask=mask, other=0)


@triton.jit
def _columns(x):
    """Keys [keys, elements] as columns."""
    if x.shape[0] == 1:
        x = tl.broadcast_to(x, (LEAST_COLUMNS, x.shape[1]))
    return tl.trans(x)


@triton.jit
def _score_scale(
    groups, KIND: tl.constexpr, PLACE: tl.constexpr, AT: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """What products of codes at a place in bytes AT a row are multiplied by, fp32 [keys]."""
    EXPONENT: tl.constexpr = exponent(unit(KIND, COMPUTE, PLACE))
    return wide_scale(groups, (PLACE * (DIM // codes_a_byte(KIND)) + AT) // GROUP, EXPONENT)


@triton.jit
def mean_scores(
    q, sums, means, at, KEYS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
    WIDTH: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """q . mean of one block for all keys of a tile in it, fp32 [rows, KEYS]; `at`: words before its row."""
    none = tl.zeros((q[0].shape[0], LEAST_COLUMNS), tl.float32)
    codes = means.to(tl.pointer_type(tl.int16), bitcast=True)
    scores = packed_scores(
        q, sums, none, codes, means + DIM // 8, 2 * at, at, tl.arange(0, 1) == 0,
        INT4, DIM, GROUP, RUN, WIDTH, LEAST_COLUMNS, COMPUTE, 1,
    )  # fmt: skip
    shape: tl.constexpr = (q[0].shape[0], KEYS // LEAST_COLUMNS, LEAST_COLUMNS)
    return tl.reshape(tl.broadcast_to(scores[:, None, :], shape), (q[0].shape[0], KEYS))


@triton.jit
def packed_scores(
    q, sums, before, codes, scales, codes_at, scales_at, inside,
    KIND: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr, COMPUTE: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """q . k of one tile, fp32 [rows, keys], added to `before`: partial products of every group times its
    scale, and one product of the queries' sums with all minimums; sums come in two numbers, so that nothing
    is rounded. A single key is that of all of LEAST_COLUMNS columns.
    """
    PER: tl.constexpr = codes_a_byte(KIND)
    pairs = group_minimums(scales, scales_at, inside, DIM // GROUP, PAIRS, COMPUTE, 8 // PER)
    if is_narrow(scales):
        total = added_dot(sums[0], _columns(side_by_side(pairs, pairs)), before)
    else:
        pairs = tl.trans(pairs)
        total = added_dot(sums[0], pairs, added_dot(sums[1], pairs, before))
    groups = group_words(scales, scales_at, inside, DIM // GROUP, SPREAD)
    for j in tl.static_range(DIM // PER // RUN):
        parts = word_parts(_run_of_words(codes, codes_at, inside, j * RUN, RUN, WIDTH), KIND, COMPUTE)
        products = ()
        for i in tl.static_range(PER):
            even = dot(q[2 * PER * j + i], _columns(parts[i]))
            products = products + (added_dot(q[2 * PER * j + PER + i], _columns(parts[PER + i]), even),)
        for i in tl.static_range(PER):
            total += products[i] * _score_scale(groups, KIND, i, j * RUN, DIM, GROUP, COMPUTE)[None, :]
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
def word_outputs(
    ROWS: tl.constexpr, KIND: tl.constexpr, DIM: tl.constexpr, RUN: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """The parts of an output of zeros, [ROWS, WIDTH] each; INT4 has four a run, and before them one [ROWS,
    PAIRS] for what minimums add, in the columns where the minimums are.
    """
    run = tl.zeros((ROWS, WIDTH), tl.float32)
    outs = (run, run)
    if KIND >= INT4:
        outs = (tl.zeros((ROWS, PAIRS), tl.float32),)
        for _ in tl.static_range(2 * (DIM // RUN)):
            outs = outs + (run,)
    return outs


@triton.jit
def _taken_in(out, decay, weights, values, more):
    """What came before, times `decay`, and `more` and the products of one tile, rounded to nearest.

    Tensor cores cut off what they add to a sum. Codes of INT4 are never negative, so a product that took in
    the sum as well would fall short by as much in every column: over 34,816 keys by 1.5% of a result, all of
    it in one column if V was rotated.
    """
    return tl.fma(out, tl.broadcast_to(decay[:, None], out.shape), added_dot(weights, values, more))


@triton.jit
def add_packed_values(
    outs, p, decay, codes, scales, codes_at, scales_at, inside,
    KIND: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr, COMPUTE: tl.constexpr, SPREAD: tl.constexpr, means, means_at,
    MEAN_GROUP: tl.constexpr,
):  # fmt: skip
    """Let the parts of the output take in one tile of packed rows, and with means the mean of their block."""
    PER: tl.constexpr = codes_a_byte(KIND)
    pairs = group_minimums(scales, scales_at, inside, DIM // GROUP, PAIRS, COMPUTE, 8 // PER)
    weights = p.to(COMPUTE)
    mean = _mean_of_values(p, means, means_at, DIM, MEAN_GROUP, PAIRS, COMPUTE)
    more = tl.zeros(outs[0].shape, tl.float32) if MEAN_GROUP == 0 else dot(mean[0], mean[1])
    new = (_taken_in(outs[0], decay, weights, pairs, more),)
    groups = group_words(scales, scales_at, inside, DIM // GROUP, SPREAD)
    for j in tl.static_range(DIM // PER // RUN):
        parts = word_parts(_run_of_words(codes, codes_at, inside, j * RUN, RUN, WIDTH), KIND, COMPUTE)
        more = ()
        if MEAN_GROUP == 0:
            for _ in tl.static_range(2 * PER):
                more = more + (tl.zeros(outs[1].shape, tl.float32),)
        else:
            more = _mean_run(mean, means, means_at, j, DIM, MEAN_GROUP, RUN, WIDTH, COMPUTE)
        own = ()
        for i in tl.static_range(PER):
            scale = half_scale(groups, (i * (DIM // PER) + j * RUN) // GROUP, COMPUTE)
            own = own + (scaled(weights, scale),)
        own = own + own  # for even bytes and odd ones
        for i in tl.static_range(2 * PER):
            new = new + (_taken_in(outs[2 * PER * j + i + 1], decay, own[i], parts[i], more[i]),)
    return new


@triton.jit
def _rows(x):
    """The only row of x again and again, as many as products sum over."""
    return tl.broadcast_to(x, (LEAST_KEYS, x.shape[1]))


@triton.jit
def _mean_of_values(
    p, means, at, DIM: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr, COMPUTE: tl.constexpr
):
    """Sums of weights p fp32 [rows, keys] over every LEAST_KEYS-th key, a mean's minimums in the second half
    of the columns of minimums, and words of its scales; nothing without means."""
    mean = ()
    if GROUP > 0:
        weights = folded(p, LEAST_KEYS).to(COMPUTE)
        inside = tl.arange(0, 1) == 0
        pairs = group_minimums(means + DIM // 8, at, inside, DIM // GROUP, PAIRS // 2, COMPUTE, 4)
        pairs = side_by_side(tl.zeros(pairs.shape, COMPUTE), pairs)
        mean = (weights, _rows(pairs), group_words(means + DIM // 8, at, inside, DIM // GROUP, 1))
    return mean


@triton.jit
def _mean_run(
    mean, means, at, J: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
    WIDTH: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Products of one run of a mean, as INT4 rows have them."""
    codes = means.to(tl.pointer_type(tl.int16), bitcast=True)
    inside = tl.arange(0, 1) == 0
    parts = word_parts(_run_of_words(codes, 2 * at, inside, J * RUN, RUN, WIDTH), INT4, COMPUTE)
    low = scaled(mean[0], half_scale(mean[2], J * RUN // GROUP, COMPUTE))
    high = scaled(mean[0], half_scale(mean[2], (DIM // 2 + J * RUN) // GROUP, COMPUTE))
    return (
        dot(low, _rows(parts[0])), dot(high, _rows(parts[1])),
        dot(low, _rows(parts[2])), dot(high, _rows(parts[3])),
    )  # fmt: skip


@triton.jit
def add_byte_values(
    outs, weights, decay, codes, codes_at, inside,
    KIND: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Let the parts of the output take in one tile of FP8 or INT8 rows."""
    parts = word_parts(_run_of_words(codes, codes_at, inside, 0, DIM, WIDTH), KIND, COMPUTE)
    even = added_dot(weights, parts[0], outs[0] * decay[:, None])
    odd = added_dot(weights, parts[1], outs[1] * decay[:, None])
    return even, odd


@triton.jit
def _column(x, COLUMN: tl.constexpr):
    """One column of x [ROWS, PAIRS], [ROWS, 1]."""
    own = tl.arange(0, x.shape[1])[None, :] == COLUMN
    return tl.sum(tl.where(own, x, 0.0), axis=1)[:, None]


@triton.jit
def _minimum(x, AT: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, MEAN_GROUP: tl.constexpr):
    """What minimums add to the run of elements that begins AT, of rows and of means, [ROWS, 1]."""
    added = _column(x, STEP * (AT // GROUP) + STEP - 1)
    if MEAN_GROUP > 0:
        added += _column(x, x.shape[1] // 2 + AT // MEAN_GROUP)
    return added


@triton.jit
def joined(
    outs, KIND: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
    COMPUTE: tl.constexpr, STEP: tl.constexpr, MEAN_GROUP: tl.constexpr,
):  # fmt: skip
    """The output [ROWS, PAD] of its parts. MEAN_GROUP: of means; 0: none."""
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
    """The first RUN columns of COUNT runs as [ROWS, PAD]."""
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
    """The columns of COUNT runs, a power of two."""
    if COUNT == 1:
        out = runs[START]
    else:
        HALF: tl.constexpr = COUNT // 2
        out = side_by_side(all_side_by_side(runs, START, HALF), all_side_by_side(runs, START + HALF, HALF))
    return out
