"""Search plan of a row (the bins in which its searches can end, computed from per-bin sums) and the searches
themselves, in Triton, with one program per row.

There are three successive searches. The search for top_k ends at a count and keeps a mass; the search for the
nucleus ends at a share of that mass; the search for the sampled token ends at a share of the nucleus's mass.
Per-bin sums bound the first mass from both sides. Since each goal increases with the previous mass, they also
bound the bins in which the later searches can end.
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
    GATHERED,
    KEPT,
    MASS,
    MASSES,
    NUCLEUS,
    OPEN,
    RANKED,
    RAW,
    ROOM,
    SPAN,
    SPANS,
    TOP,
    TOP_K,
    TOP_P,
    UNIFORM,
    WHOLE,
    WIDE,
    between,
    key_of,
    load_logits,
    logit,
    logit_of,
    masses_and_bins,
    measures,
    of_spans,
    place_in,
    real,
    token_of,
)

_AT_ONCE = tl.constexpr(2048)
_NONE = tl.constexpr(-(1 << 62))  # below every key
_ABOVE = tl.constexpr(1 << 62)


@triton.jit
def needed(kept, top_p):
    """Return the mass that the nucleus must reach."""
    share = tl.ceil(top_p * kept.to(tl.float64)).to(tl.int64)
    share = tl.maximum(tl.minimum(share, kept), 1)  # rounding up may pass the total
    return tl.where(top_p < 1, share, kept)


@triton.jit
def goal(total, uniform):
    """Return the running sum that the sampled token is the first to reach: floor(u * total) + 1."""
    mark = (uniform * total.to(tl.float64)).to(tl.int64)
    return tl.minimum(mark, total - 1) + 1  # a product near the total may round up to it


@triton.jit
def _before(values, bins, end):
    return tl.sum(tl.where(bins < end, values, 0), axis=0)


@triton.jit
def _first(through, least):
    """Return the first bin whose running sum reaches `least`."""
    return tl.sum((through < least).to(tl.int32), axis=0)


@triton.jit
def _bounds(mass, counts, bins, params):
    """Return the bin in which top_k ends, or -1 if the mass that it keeps is known; an upper bound of that
    mass; and the first and last bins in which the nucleus can end and in which the sampled token can lie."""
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
    first = tl.where(top_p < 1, first, -1)  # otherwise, the nucleus is what top_k keeps
    last = tl.where(top_p < 1, last, -1)
    return tl.where(known, -1, cut), most, first, last, drawn, drawn_last


@triton.jit
def open_kernel(params_ptr, scratch_ptr, vocab, scratch_stride, SPANS_PAD: tl.constexpr):
    """Choose the brackets to split into bins; the sums of each other bracket go to its first bin."""
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
    """Choose the bins that must be searched token by token."""
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


@triton.jit
def choose_kernel(  # D248: three searches, not a sort
    logits_ptr, params_ptr, scratch_ptr, tokens_ptr, numbers_ptr, vocab, row_stride, scratch_stride,
    SPANS_PAD: tl.constexpr, CHANGED: tl.constexpr, ALL_GREEDY: tl.constexpr,
):  # fmt: skip
    """Store a row's token and, for the host, its highest logits before and after changes."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    scratch = scratch_ptr + row * scratch_stride
    top = tl.max(of_spans(scratch, TOP, vocab, _NONE, SPANS_PAD), axis=0)
    peak = logit_of(top)
    raw = peak
    if CHANGED:
        raw = logit(tl.max(of_spans(scratch, RAW, vocab, _NONE, SPANS_PAD), axis=0))
    token = token_of(top)
    if not ALL_GREEDY:
        params = params_ptr + row * COLUMNS
        measured = measures(scratch, params, vocab, SPANS_PAD)
        row_ptr = logits_ptr + row * row_stride
        if measured[0] == WHOLE:
            token = _draw_whole(row_ptr, params, scratch, measured, vocab, SPANS_PAD)
        if measured[0] == RANKED:
            token = _draw_ranked(row_ptr, params, scratch, measured, vocab)
    tl.store(tokens_ptr + row, token)
    tl.store(numbers_ptr + row, token.to(tl.float64))
    tl.store(numbers_ptr + rows + row, raw.to(tl.float64))
    tl.store(numbers_ptr + 2 * rows + row, peak.to(tl.float64))


@triton.jit
def _draw_whole(row_ptr, params, scratch, measured, vocab, SPANS_PAD: tl.constexpr):
    """Return the token at which the running sum in token order reaches its goal."""
    mass = of_spans(scratch, MASSES, vocab, 0, SPANS_PAD)
    least = goal(tl.sum(mass, axis=0), real(params, UNIFORM))
    span = tl.sum((tl.cumsum(mass, axis=0) < least).to(tl.int32), axis=0)
    before = tl.sum(tl.where(tl.arange(0, SPANS_PAD) < span, mass, 0), axis=0)
    _, peak, temperature, bar, steps = measured
    logits = load_logits(row_ptr, span * SPAN + tl.arange(0, SPAN), vocab)
    mass, _ = masses_and_bins(logits, peak, temperature, bar, steps)
    running = tl.cumsum(mass, axis=0) + before
    return (span * SPAN + tl.sum((running < least).to(tl.int32), axis=0)).to(tl.int64)


@triton.jit
def _draw_ranked(row_ptr, params, plan, measured, vocab):
    """Return the token at which the running sum in order of likelihood reaches its goal."""
    found = place_in(plan, FOUND)
    gathered = found <= ROOM
    source = row_ptr, plan + GATHERED, gathered, tl.where(gathered, found, vocab)
    top_p = real(params, TOP_P)
    cut, total = place_in(plan, CUT), tl.load(plan + KEPT)
    if cut >= 0:
        left = tl.load(params + TOP_K) - tl.load(plan + CUT_COUNT)
        _, total = _seek(source, measured, cut, cut, tl.load(plan + CUT_MASS), left, True)
    if top_p < 1:
        first, last = place_in(plan, NUCLEUS), place_in(plan, NUCLEUS + 1)
        least = needed(total, top_p)
        _, total = _seek(source, measured, first, last, tl.load(plan + NUCLEUS + 2), least, False)
    first, last = place_in(plan, DRAWN), place_in(plan, DRAWN + 1)
    least = goal(total, real(params, UNIFORM))
    key, _ = _seek(source, measured, first, last, tl.load(plan + DRAWN + 2), least, False)
    return token_of(key)


@triton.jit
def _seek(source, measured, first, last, before, least, BY_COUNT: tl.constexpr):
    """Return the key in bins `first` to `last` at which the sum reaches `least`, and the mass up to that key.

    `before`: mass of all likelier bins; with BY_COUNT, their count has been subtracted from `least`. Both
    ends of the searched interval are always existing keys, so it is halved until a single key is left.
    """
    _, mass, low, high = _up_to(source, measured, first, last, _NONE)
    mass += before
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        some, part, above, below = _up_to(source, measured, first, last, middle)
        part += before
        enough = some >= least if BY_COUNT else part >= least
        low = tl.where(enough, above, low)
        mass = tl.where(enough, part, mass)
        high = tl.where(enough, high, below)
    return low, mass


@triton.jit
def _up_to(source, measured, first, last, middle):
    """Return the count, mass and minimum of the keys >= `middle` in some bins, and the highest key below it.

    If `middle` is below all keys, the last result is the highest of all keys.
    """
    row_ptr, candidates, gathered, length = source
    _, peak, temperature, bar, steps = measured
    count = tl.zeros((), tl.int64)
    mass = tl.zeros((), tl.int64)
    lowest = tl.full((), _ABOVE, tl.int64)
    highest = tl.full((), _NONE, tl.int64)
    for start in range(0, length, _AT_ONCE):
        at = start + tl.arange(0, _AT_ONCE)
        if gathered:
            keys = tl.load(candidates + at, mask=at < length, other=_NONE)
        else:
            keys = key_of(load_logits(row_ptr, at, length), at)
        masses, bins = masses_and_bins(logit_of(keys), peak, temperature, bar, steps)
        here = (at < length) & between(bins, first, last)
        above = here & (keys >= middle)
        count += tl.sum(above.to(tl.int64), axis=0)
        mass += tl.sum(tl.where(above, masses, 0), axis=0)
        lowest = tl.minimum(lowest, tl.min(tl.where(above, keys, _ABOVE), axis=0))
        below = here & ((keys < middle) | (middle == _NONE))
        highest = tl.maximum(highest, tl.max(tl.where(below, keys, _NONE), axis=0))
    return count, mass, lowest, highest
