"""The passes over a whole row in Triton: a program reads one span of it."""

import triton
import triton.language as tl

from kvq.kernels.draw.triton_rows import (
    BINS,
    BRACKETS,
    COLUMNS,
    CUT,
    DRAWN,
    FOUND,
    KIND,
    NUCLEUS,
    OPEN,
    PLAN,
    RANKED,
    ROOM,
    SPAN,
    WHOLE,
    is_finite,
    key_of,
    load_logits,
    masses_and_bins,
    measures,
    rank,
)


@triton.jit
def peaks_kernel(
    logits_ptr, raw_ptr, tops_ptr, lows_ptr, raws_ptr, vocab, row_stride, raw_stride,
    CHANGED: tl.constexpr,
):  # fmt: skip
    """The key of a span's likeliest token, the ranks of its lowest finite logit and highest raw one."""
    span, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tokens = span * SPAN + tl.arange(0, SPAN)
    logits = load_logits(logits_ptr + row * row_stride, tokens, vocab)
    at = row * tl.num_programs(0) + span
    keys = tl.where(tokens < vocab, key_of(logits, tokens), -(1 << 62))
    tl.store(tops_ptr + at, tl.max(keys, axis=0))
    tl.store(lows_ptr + at, tl.min(tl.where(is_finite(logits), rank(logits), 0x7FFFFFFF), axis=0))
    if CHANGED:
        raw = load_logits(raw_ptr + row * raw_stride, tokens, vocab)
        tl.store(raws_ptr + at, tl.max(rank(raw), axis=0))


@triton.jit
def brackets_kernel(
    logits_ptr, params_ptr, tops_ptr, lows_ptr, masses_ptr, counts_ptr, vocab, row_stride,
    SPANS_PAD: tl.constexpr,
):  # fmt: skip
    """A span's mass and tokens by bracket; where nothing ranks tokens, its mass alone, as the first's."""
    span, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    spans = tl.num_programs(0)
    params = params_ptr + row * COLUMNS
    kind = tl.load(params + KIND)
    peak, temperature, bar, steps = measures(
        tops_ptr + row * spans, lows_ptr + row * spans, params, spans, SPANS_PAD
    )
    if (kind < WHOLE) | (is_finite(peak) == 0):
        return
    tokens = span * SPAN + tl.arange(0, SPAN)
    logits = load_logits(logits_ptr + row * row_stride, tokens, vocab)
    mass, bins = masses_and_bins(logits, peak, temperature, bar, steps)
    at = (row * spans + span) * BRACKETS
    if kind == WHOLE:
        tl.store(masses_ptr + at, tl.sum(mass, axis=0))
    else:
        bracket = tl.where(tokens < vocab, bins // (BINS // BRACKETS), BRACKETS)
        for i in tl.static_range(BRACKETS):
            tl.store(masses_ptr + at + i, tl.sum(tl.where(bracket == i, mass, 0), axis=0))
            tl.store(counts_ptr + at + i, tl.sum((bracket == i).to(tl.int32), axis=0))


@triton.jit
def bins_kernel(
    logits_ptr, params_ptr, tops_ptr, lows_ptr, plans_ptr, masses_ptr, counts_ptr, vocab, row_stride,
    SPANS_PAD: tl.constexpr,
):  # fmt: skip
    """Add a span's mass and tokens to the row's bins, in the brackets whose bins are to be told apart."""
    span, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    spans = tl.num_programs(0)
    params = params_ptr + row * COLUMNS
    peak, temperature, bar, steps = measures(
        tops_ptr + row * spans, lows_ptr + row * spans, params, spans, SPANS_PAD
    )
    if (tl.load(params + KIND) != RANKED) | (is_finite(peak) == 0):
        return
    tokens = span * SPAN + tl.arange(0, SPAN)
    logits = load_logits(logits_ptr + row * row_stride, tokens, vocab)
    mass, bins = masses_and_bins(logits, peak, temperature, bar, steps)
    brackets = tl.load(plans_ptr + row * PLAN + OPEN).to(tl.int32)
    wanted = (tokens < vocab) & (((brackets >> (bins // (BINS // BRACKETS))) & 1) == 1)
    tl.atomic_add(masses_ptr + row * BINS + bins, mass, mask=wanted & (mass > 0), sem="relaxed")
    tl.atomic_add(counts_ptr + row * BINS + bins, 1, mask=wanted, sem="relaxed")


@triton.jit
def gather_kernel(
    logits_ptr, params_ptr, tops_ptr, lows_ptr, plans_ptr, candidates_ptr, vocab, row_stride,
    SPANS_PAD: tl.constexpr,
):  # fmt: skip
    """Keep the keys of the span's tokens in bins that have to be searched, in any order."""
    span, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    spans = tl.num_programs(0)
    params = params_ptr + row * COLUMNS
    peak, temperature, bar, steps = measures(
        tops_ptr + row * spans, lows_ptr + row * spans, params, spans, SPANS_PAD
    )
    if (tl.load(params + KIND) != RANKED) | (is_finite(peak) == 0):
        return
    tokens = span * SPAN + tl.arange(0, SPAN)
    logits = load_logits(logits_ptr + row * row_stride, tokens, vocab)
    _, bins = masses_and_bins(logits, peak, temperature, bar, steps)
    plan = plans_ptr + row * PLAN
    wanted = bins == tl.load(plan + CUT)
    wanted |= (bins >= tl.load(plan + NUCLEUS)) & (bins <= tl.load(plan + NUCLEUS + 1))
    wanted |= (bins >= tl.load(plan + DRAWN)) & (bins <= tl.load(plan + DRAWN + 1))
    wanted &= tokens < vocab
    found = tl.sum(wanted.to(tl.int32), axis=0)
    if found > 0:
        first = tl.atomic_add(plan + FOUND, found.to(tl.int64), sem="relaxed")
        place = first + tl.cumsum(wanted.to(tl.int32), axis=0) - 1
        keys = key_of(logits, tokens)
        tl.store(candidates_ptr + row * ROOM + place, keys, mask=wanted & (place < ROOM))
