"""Search plan of a row: where its searches end, as far as sums by bin tell. In Triton, a program a row.

Three searches follow each other. top_k ends at a count and leaves a mass; the nucleus ends at a share of
that; the draw, at a share of what the nucleus holds. Sums by bin bound the first mass from both sides and so,
since each goal rises with the mass before it, the bins in which the others can end.
"""

import triton
import triton.language as tl

from kvq.kernels.draw.triton_rows import (
    BIN_COUNTS,
    BIN_MASSES,
    BINS,
    BRACKETS,
    COLUMNS,
    COUNTS,
    CUT,
    CUT_COUNT,
    CUT_MASS,
    DRAWN,
    FOUND,
    KEPT,
    MASS,
    MASSES,
    NUCLEUS,
    OPEN,
    RANKED,
    SPAN,
    SPANS,
    TOP_K,
    TOP_P,
    UNIFORM,
    WIDE,
    between,
    measures,
    real,
)


@triton.jit
def needed(kept, top_p):
    """The mass that the nucleus has to reach."""
    share = tl.ceil(top_p * kept.to(tl.float64)).to(tl.int64)
    share = tl.maximum(tl.minimum(share, kept), 1)  # rounding up may pass the total
    return tl.where(top_p < 1, share, kept)


@triton.jit
def goal(total, uniform):
    """The running sum that the drawn token is the first to reach: one more than u * total."""
    mark = (uniform * total.to(tl.float64)).to(tl.int64)
    return tl.minimum(mark, total - 1) + 1  # a product near the total may round up to it


@triton.jit
def _before(values, bins, end):
    return tl.sum(tl.where(bins < end, values, 0), axis=0)


@triton.jit
def _first(through, least):
    """The first bin whose running sum reaches it."""
    return tl.sum((through < least).to(tl.int32), axis=0)


@triton.jit
def _bounds(mass, counts, bins, params):
    """The bin in which top_k ends, or -1 where the mass that it leaves is known; the least and most of that
    mass; and the first and last bin in which the nucleus and the drawn token can lie.
    """
    through = tl.cumsum(mass, axis=0)
    top_k, top_p = tl.load(params + TOP_K), real(params, TOP_P)
    cut = _first(tl.cumsum(counts, axis=0), top_k)
    most, least = _before(mass, bins, cut + 1), _before(mass, bins, cut)
    known = (most == least) | (_before(counts, bins, cut + 1) == top_k)
    least = tl.where(known, most, tl.maximum(least, MASS))
    first, last = _first(through, needed(least, top_p)), _first(through, needed(most, top_p))
    uniform = real(params, UNIFORM)
    low = tl.maximum(_before(mass, bins, first), needed(least, top_p))
    high = tl.minimum(_before(mass, bins, last + 1), most)
    drawn, drawn_last = _first(through, goal(low, uniform)), _first(through, goal(high, uniform))
    first = tl.where(top_p < 1, first, -1)  # else the nucleus is what top_k leaves
    last = tl.where(top_p < 1, last, -1)
    return tl.where(known, -1, cut), most, first, last, drawn, drawn_last


@triton.jit
def open_kernel(params_ptr, scratch_ptr, vocab, scratch_stride, SPANS_PAD: tl.constexpr):
    """Choose the brackets whose bins are told apart; every other is one bin, its first."""
    row = tl.program_id(0).to(tl.int64)
    scratch, params = scratch_ptr + row * scratch_stride, params_ptr + row * COLUMNS
    kind, _, _, _, _ = measures(scratch, params, vocab, SPANS_PAD)
    if kind != RANKED:
        return
    spans = tl.cdiv(vocab, SPAN)
    span = tl.arange(0, SPANS_PAD)[None, :]
    brackets = tl.arange(0, BRACKETS)
    at = scratch + SPANS + brackets[:, None] * spans + span
    mass = tl.sum(tl.load(at + MASSES * spans, mask=span < spans, other=0), axis=1)  # [BRACKETS]
    counts = tl.sum(tl.load(at + COUNTS * spans, mask=span < spans, other=0), axis=1)
    cut, _, first, last, drawn, drawn_last = _bounds(mass, counts, brackets, params)
    wanted = (brackets == cut) | between(brackets, first, last) | between(brackets, drawn, drawn_last)
    tl.store(scratch + OPEN, tl.sum(tl.where(wanted, 1 << brackets, 0), axis=0))
    fine = tl.arange(0, WIDE)[None, :]
    closed = (fine == 0) & (wanted[:, None] == 0)
    bins = brackets[:, None] * WIDE + fine
    tl.store(scratch + BIN_MASSES + bins, tl.where(closed, mass[:, None], 0))
    tl.store(scratch + BIN_COUNTS + bins, tl.where(closed, counts[:, None], 0))


@triton.jit
def plan_kernel(params_ptr, scratch_ptr, vocab, scratch_stride, SPANS_PAD: tl.constexpr):
    """Choose the bins that have to be searched token by token."""
    row = tl.program_id(0).to(tl.int64)
    plan, params = scratch_ptr + row * scratch_stride, params_ptr + row * COLUMNS
    kind, _, _, _, _ = measures(plan, params, vocab, SPANS_PAD)
    if kind != RANKED:
        return
    bins = tl.arange(0, BINS)
    mass, counts = tl.load(plan + BIN_MASSES + bins), tl.load(plan + BIN_COUNTS + bins)
    cut, kept, first, last, drawn, drawn_last = _bounds(mass, counts, bins, params)
    tl.store(plan + FOUND, 0)
    tl.store(plan + CUT, cut)
    tl.store(plan + CUT_COUNT, _before(counts, bins, cut))
    tl.store(plan + CUT_MASS, _before(mass, bins, cut))
    tl.store(plan + KEPT, kept)
    tl.store(plan + NUCLEUS, first)
    tl.store(plan + NUCLEUS + 1, last)
    tl.store(plan + NUCLEUS + 2, _before(mass, bins, first))
    tl.store(plan + DRAWN, drawn)
    tl.store(plan + DRAWN + 1, drawn_last)
    tl.store(plan + DRAWN + 2, _before(mass, bins, drawn))
