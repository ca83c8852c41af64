"""The passes over a whole row in Triton: a program reads one span of it."""

import triton
import triton.language as tl

from kvq.kernels.draw.triton_rows import (
    BIN_COUNTS,
    BIN_MASSES,
    BRACKETS,
    COLUMNS,
    COUNTS,
    CUT,
    DRAWN,
    FOUND,
    GATHERED,
    LAST_ID,
    LOW,
    MASSES,
    NUCLEUS,
    OPEN,
    RANKED,
    RAW,
    ROOM,
    SPAN,
    SPANS,
    TOP,
    WHOLE,
    WIDE,
    between,
    is_finite,
    key_of,
    load_logits,
    masses_and_bins,
    measures,
    place_in,
    rank,
)


@triton.jit
def peaks_kernel(
    logits_ptr, raw_ptr, scratch_ptr, vocab, row_stride, raw_stride, scratch_stride, CHANGED: tl.constexpr
):
    """The key of a span's likeliest token, the ranks of its lowest finite logit and highest raw one."""
    span, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    spans = tl.num_programs(0)
    tokens = span * SPAN + tl.arange(0, SPAN)
    logits = load_logits(logits_ptr + row * row_stride, tokens, vocab)
    into = scratch_ptr + row * scratch_stride + SPANS + span
    ranks = rank(logits)
    top = tl.max(ranks, axis=0)  # behind the vocabulary is -inf, which the lower ids beat
    first = tl.min(tl.where(ranks == top, tokens, LAST_ID), axis=0)
    tl.store(into + TOP * spans, (top.to(tl.int64) << 20) | (LAST_ID - first))
    tl.store(into + LOW * spans, tl.min(tl.where(is_finite(logits), ranks, 0x7FFFFFFF), axis=0))
    if CHANGED:
        raw = load_logits(raw_ptr + row * raw_stride, tokens, vocab)
        tl.store(into + RAW * spans, tl.max(rank(raw), axis=0))


@triton.jit
def brackets_kernel(
    logits_ptr, params_ptr, scratch_ptr, vocab, row_stride, scratch_stride, SPANS_PAD: tl.constexpr
):
    """A span's masses and counts by bracket; where nothing ranks tokens its mass, in the first's place."""
    span, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    spans = tl.num_programs(0)
    scratch = scratch_ptr + row * scratch_stride
    kind, peak, temperature, bar, steps = measures(scratch, params_ptr + row * COLUMNS, vocab, SPANS_PAD)
    if kind < WHOLE:
        return
    tokens = span * SPAN + tl.arange(0, SPAN)
    logits = load_logits(logits_ptr + row * row_stride, tokens, vocab)
    mass, bins = masses_and_bins(logits, peak, temperature, bar, steps)
    into = scratch + SPANS + span
    if kind == WHOLE:
        tl.store(into + MASSES * spans, tl.sum(mass, axis=0))
    else:
        bracket = tl.where(tokens < vocab, bins // WIDE, BRACKETS)
        for i in tl.static_range(BRACKETS):
            tl.store(into + (MASSES + i) * spans, tl.sum(tl.where(bracket == i, mass, 0), axis=0))
            tl.store(into + (COUNTS + i) * spans, tl.sum((bracket == i).to(tl.int32), axis=0))


@triton.jit
def bins_kernel(
    logits_ptr, params_ptr, scratch_ptr, vocab, row_stride, scratch_stride, SPANS_PAD: tl.constexpr
):
    """Add a span's masses and counts to the row's bins, in the brackets whose bins are told apart."""
    span, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    scratch = scratch_ptr + row * scratch_stride
    kind, peak, temperature, bar, steps = measures(scratch, params_ptr + row * COLUMNS, vocab, SPANS_PAD)
    if kind != RANKED:
        return
    tokens = span * SPAN + tl.arange(0, SPAN)
    logits = load_logits(logits_ptr + row * row_stride, tokens, vocab)
    mass, bins = masses_and_bins(logits, peak, temperature, bar, steps)
    brackets = place_in(scratch, OPEN)
    wanted = (tokens < vocab) & (((brackets >> (bins // WIDE)) & 1) == 1)
    tl.atomic_add(scratch + BIN_MASSES + bins, mass, mask=wanted & (mass > 0), sem="relaxed")
    tl.atomic_add(scratch + BIN_COUNTS + bins, tl.full((SPAN,), 1, tl.int64), mask=wanted, sem="relaxed")


@triton.jit
def gather_kernel(
    logits_ptr, params_ptr, scratch_ptr, vocab, row_stride, scratch_stride, SPANS_PAD: tl.constexpr
):
    """Keep the keys of the span's tokens in bins that have to be searched, in any order."""
    span, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    plan = scratch_ptr + row * scratch_stride
    kind, peak, temperature, bar, steps = measures(plan, params_ptr + row * COLUMNS, vocab, SPANS_PAD)
    if kind != RANKED:
        return
    tokens = span * SPAN + tl.arange(0, SPAN)
    logits = load_logits(logits_ptr + row * row_stride, tokens, vocab)
    _, bins = masses_and_bins(logits, peak, temperature, bar, steps)
    wanted = bins == place_in(plan, CUT)
    wanted |= between(bins, place_in(plan, NUCLEUS), place_in(plan, NUCLEUS + 1))
    wanted |= between(bins, place_in(plan, DRAWN), place_in(plan, DRAWN + 1))
    wanted &= tokens < vocab
    found = tl.sum(wanted.to(tl.int32), axis=0)
    if found > 0:
        first = tl.atomic_add(plan + FOUND, found.to(tl.int64), sem="relaxed").to(tl.int32)
        place = first + tl.cumsum(wanted.to(tl.int32), axis=0) - 1
        tl.store(plan + GATHERED + place, key_of(logits, tokens), mask=wanted & (place < ROOM))
