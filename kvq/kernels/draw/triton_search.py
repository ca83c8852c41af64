"""The last steps to a row's token, in Triton: a program a row."""

import triton
import triton.language as tl

from kvq.kernels.draw.triton_plan import goal, needed
from kvq.kernels.draw.triton_rows import (
    COLUMNS,
    CUT,
    CUT_COUNT,
    CUT_MASS,
    DRAWN,
    FOUND,
    GATHERED,
    KEPT,
    MASSES,
    NUCLEUS,
    RANKED,
    RAW,
    ROOM,
    SPAN,
    TOP,
    TOP_K,
    TOP_P,
    UNIFORM,
    WHOLE,
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
def choose_kernel(  # D248: three searches, not a sort
    logits_ptr, params_ptr, scratch_ptr, tokens_ptr, numbers_ptr, vocab, row_stride, scratch_stride,
    SPANS_PAD: tl.constexpr, CHANGED: tl.constexpr, ALL_GREEDY: tl.constexpr,
):  # fmt: skip
    """A row's token; beside it the highest logit before and after changes, for the host."""
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
    """The token at which the running sum in token order reaches its goal."""
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
    """The token at which the running sum in order of likelihood reaches its goal."""
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
    """The key in bins `first` to `last` at which the running sum reaches `least`, and the mass up to it.

    `before`: the mass of what is likelier than these bins, whose count is already taken off `least`. The
    interval's ends are always keys that exist, so it halves until one is left.
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
    """Count and mass of the keys from `middle` up in some bins, the lowest of them, and the highest below.

    Where `middle` is below all, the highest of all takes the place of the last.
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
