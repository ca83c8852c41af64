"""Rows of logits in Triton: keys in order of likelihood, masses, bins, the layout of scratch memory, and the
passes over a row, in which each program reads one span.

A token's key is an integer that increases with its likelihood; no two keys of a row are equal:

    key = rank of the logit, likeliest highest (32 bits) | LAST_ID - token id (20 bits)

A token's bin is the distance of its score from the likeliest token's score, in equal steps. Division, product
and floor are monotonic, so a token with a higher logit never has a later bin, and equal logits share a bin.
"""

import triton
import triton.language as tl

from kvq.kernels.draw import parameters
from kvq.kernels.draw.reference import MASS_OF_LIKELIEST, MAX_VOCAB

SPAN = tl.constexpr(4096)  # tokens that a program reads
BINS = tl.constexpr(2048)
BRACKETS = tl.constexpr(16)  # D408
WIDE = tl.constexpr(BINS.value // BRACKETS.value)  # adjacent bins of a bracket
ROOM = tl.constexpr(4096)  # maximum number of candidates gathered; a row with more is searched in place
MASS = tl.constexpr(MASS_OF_LIKELIEST)  # of the likeliest token
# Scores this far below the likeliest have no mass: exp(-30.5) * 2**43 < 1. They share the last bin.
REACH = tl.constexpr(30.5)
LAST_ID = tl.constexpr(MAX_VOCAB)

KIND, UNIFORM = tl.constexpr(parameters.KIND), tl.constexpr(parameters.UNIFORM)
TEMPERATURE, BAR = tl.constexpr(parameters.TEMPERATURE), tl.constexpr(parameters.BAR)
TOP_K, TOP_P = tl.constexpr(parameters.TOP_K), tl.constexpr(parameters.TOP_P)
COLUMNS = tl.constexpr(parameters.COLUMNS)
GREEDY, WHOLE, RANKED = (tl.constexpr(kind.value) for kind in parameters.Kind)

# A row's scratch memory begins with its plan: the number of gathered candidates; the brackets that are split
# into bins, as bits; the bin in which top_k ends, with the count and mass before it, or -1 and the mass that
# is kept; the first and last bins in which the nucleus may end and the drawn token may lie, each pair with
# the mass before it. Then follow masses and counts by bin, the candidates' keys, and the results of spans.
FOUND, OPEN, CUT, CUT_COUNT, CUT_MASS, KEPT = (tl.constexpr(slot) for slot in range(6))
NUCLEUS, DRAWN = tl.constexpr(6), tl.constexpr(9)
BIN_MASSES = tl.constexpr(16)
BIN_COUNTS = tl.constexpr(BIN_MASSES.value + BINS.value)
GATHERED = tl.constexpr(BIN_COUNTS.value + BINS.value)
SPANS = tl.constexpr(GATHERED.value + ROOM.value)
# A span's likeliest key, rank of the lowest finite logit, and of the highest before changes; masses and
# counts by bracket.
TOP, LOW, RAW, MASSES, COUNTS = (tl.constexpr(n) for n in (0, 1, 2, 3, 3 + BRACKETS.value))
SPAN_SLOTS = tl.constexpr(3 + 2 * BRACKETS.value)


@triton.jit
def rank(logits):
    """Return 32-bit integers that increase with the logit; NaN ranks above all numbers."""
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats count backwards; now they don't
    return tl.where(logits != logits, 0x7FFFFFFF, rising)


@triton.jit
def logit(rising):
    """Return the logit for a rank; inverse of `rank`."""
    bits = rising.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def key_of(logits, tokens):
    return (rank(logits).to(tl.int64) << 20) | (LAST_ID - tokens)


@triton.jit
def logit_of(keys):
    return logit(keys >> 20)


@triton.jit
def token_of(key):
    return LAST_ID - (key & LAST_ID)


@triton.jit
def load_logits(row_ptr, tokens, vocab):
    """Load logits as fp32, with -inf for tokens past the end of the vocabulary."""
    return tl.load(row_ptr + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def real(params, column):
    """Load an fp64 parameter."""
    return tl.load(params + column).to(tl.float64, bitcast=True)


@triton.jit
def place_in(plan, slot):
    """Load a number from the plan that fits in 32 bits."""
    return tl.load(plan + slot).to(tl.int32)


@triton.jit
def between(bins, first, last):
    return (bins >= first) & (bins <= last)


@triton.jit
def is_finite(logits):
    return tl.abs(logits) < float("inf")  # False for NaN


@triton.jit
def of_spans(scratch, slot, vocab, other, SPANS_PAD: tl.constexpr):
    """Return each span's entry in a slot, [SPANS_PAD]; the entries of a slot are adjacent."""
    spans = tl.cdiv(vocab, SPAN)
    span = tl.arange(0, SPANS_PAD)
    return tl.load(scratch + SPANS + slot * spans + span, mask=span < spans, other=other)


@triton.jit
def measures(scratch, params, vocab, SPANS_PAD: tl.constexpr):  # D249
    """Return a row's kind, its highest logit, its temperature, min_p's threshold, and bins per unit of score.

    A row whose highest logit isn't finite is treated as greedy: no token can be sampled from it.
    """
    peak = logit_of(tl.max(of_spans(scratch, TOP, vocab, -(1 << 62), SPANS_PAD), axis=0))
    low = logit(tl.min(of_spans(scratch, LOW, vocab, 0x7FFFFFFF, SPANS_PAD), axis=0))
    kind = tl.where(is_finite(peak), tl.load(params + KIND), GREEDY)
    temperature = real(params, TEMPERATURE).to(tl.float32)
    depth = tl.minimum(tl.div_rn(peak - low, temperature), REACH)
    steps = tl.div_rn(BINS - 2.0, tl.maximum(depth, 1e-30))  # the last bin holds no mass
    return kind, peak, temperature, tl.load(params + BAR), steps


@triton.jit
def _is_counted(params, vocab):
    """Return whether a row's tokens are counted by bin, which only top_k needs."""
    return tl.load(params + TOP_K) < vocab


@triton.jit
def masses_and_bins(logits, peak, temperature, bar, steps):
    """Return masses, floor(2**43 * exp((logit - peak) / temperature)) or 0 below the threshold, and bins."""
    scores = tl.div_rn(logits - peak, temperature)
    mass = (tl.exp(scores) * MASS).to(tl.int64)
    bins = tl.minimum(-scores * steps, BINS - 1.0).to(tl.int32)
    return tl.where(mass < bar, 0, mass), bins


@triton.jit
def peaks_kernel(
    logits_ptr, raw_ptr, scratch_ptr, vocab, row_stride, raw_stride, scratch_stride, CHANGED: tl.constexpr
):
    """Store a span's likeliest key, and the ranks of its lowest finite logit and highest raw logit."""
    span, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    spans = tl.num_programs(0)
    tokens = span * SPAN + tl.arange(0, SPAN)
    logits = load_logits(logits_ptr + row * row_stride, tokens, vocab)
    into = scratch_ptr + row * scratch_stride + SPANS + span
    ranks = rank(logits)
    top = tl.max(ranks, axis=0)  # past the vocabulary is -inf, over which lower ids win
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
    """Store a span's masses and counts per bracket or, without ranking, its total mass as the first mass."""
    span, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    spans = tl.num_programs(0)
    scratch = scratch_ptr + row * scratch_stride
    params = params_ptr + row * COLUMNS
    kind, peak, temperature, bar, steps = measures(scratch, params, vocab, SPANS_PAD)
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
        bracket = tl.where(_is_counted(params, vocab), bracket, BRACKETS)
        for i in tl.static_range(BRACKETS):
            tl.store(into + (COUNTS + i) * spans, tl.sum((bracket == i).to(tl.int32), axis=0))


@triton.jit
def bins_kernel(
    logits_ptr, params_ptr, scratch_ptr, vocab, row_stride, scratch_stride, SPANS_PAD: tl.constexpr
):
    """Add the masses and counts of a span to the row's bins, in those brackets that are split into bins."""
    span, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    scratch, params = scratch_ptr + row * scratch_stride, params_ptr + row * COLUMNS
    kind, peak, temperature, bar, steps = measures(scratch, params, vocab, SPANS_PAD)
    if kind != RANKED:
        return
    tokens = span * SPAN + tl.arange(0, SPAN)
    logits = load_logits(logits_ptr + row * row_stride, tokens, vocab)
    mass, bins = masses_and_bins(logits, peak, temperature, bar, steps)
    brackets = place_in(scratch, OPEN)
    wanted = (tokens < vocab) & (((brackets >> (bins // WIDE)) & 1) == 1)
    tl.atomic_add(scratch + BIN_MASSES + bins, mass, mask=wanted & (mass > 0), sem="relaxed")
    if _is_counted(params, vocab):
        tl.atomic_add(scratch + BIN_COUNTS + bins, tl.full((SPAN,), 1, tl.int64), mask=wanted, sem="relaxed")


@triton.jit
def gather_kernel(
    logits_ptr, params_ptr, scratch_ptr, vocab, row_stride, scratch_stride, SPANS_PAD: tl.constexpr
):
    """Store the keys of a span's tokens that lie in bins to be searched, in any order."""
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
