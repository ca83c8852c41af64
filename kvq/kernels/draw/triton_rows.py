"""Device functions over rows of logits: keys in order of likelihood, masses, bins; and where things lie.

A token's key is a whole number that falls along the ranking, no two of a row alike:

    key = rank of the logit, likeliest highest (32 bits) | LAST_ID - token id (20 bits)

Its bin is how far its score lies below the likeliest one's, in equal steps. Division, product and floor round
to the same side for all, so a token of a higher logit never has a later bin, and equal logits share one.
"""

import triton
import triton.language as tl

from kvq.kernels.draw import parameters
from kvq.kernels.draw.reference import MASS_OF_LIKELIEST

SPAN = tl.constexpr(4096)  # tokens that a program reads
BINS = tl.constexpr(2048)
BRACKETS = tl.constexpr(8)  # of BINS / BRACKETS neighbouring bins each
ROOM = tl.constexpr(4096)  # candidates that are gathered; a row with more is searched where it lies
# Scores this far below the likeliest have no mass: exp(-30.5) * 2**43 < 1. They share the last bin.
REACH = tl.constexpr(30.5)
MASS = tl.constexpr(MASS_OF_LIKELIEST)  # of the likeliest token
LAST_ID = tl.constexpr((1 << 20) - 1)

KIND, UNIFORM = tl.constexpr(parameters.KIND), tl.constexpr(parameters.UNIFORM)
TEMPERATURE, BAR = tl.constexpr(parameters.TEMPERATURE), tl.constexpr(parameters.BAR)
TOP_K, TOP_P = tl.constexpr(parameters.TOP_K), tl.constexpr(parameters.TOP_P)
COLUMNS = tl.constexpr(parameters.COLUMNS)
WHOLE, RANKED = tl.constexpr(parameters.Kind.WHOLE.value), tl.constexpr(parameters.Kind.RANKED.value)

# A row's plan: how many candidates were gathered; the brackets whose bins are told apart, as bits; the bin in
# which top_k ends with the count and mass before it, or -1 and the mass that is kept; the bins in which the
# nucleus may end and the drawn token may lie, first and last, with the mass before the first.
FOUND, OPEN, CUT, CUT_COUNT, CUT_MASS, KEPT = (tl.constexpr(slot) for slot in range(6))
NUCLEUS, DRAWN, PLAN = (tl.constexpr(slot) for slot in (6, 9, 16))


@triton.jit
def rank(logits):
    """Whole numbers of 32 bits that rise with the logit; NaN is above all."""
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats count backwards; now they don't
    return tl.where(logits != logits, 0x7FFFFFFF, rising)


@triton.jit
def logit(rising):
    """The inverse of `rank`."""
    return (rising ^ ((rising >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def key_of(logits, tokens):
    return (rank(logits).to(tl.int64) << 20) | (LAST_ID - tokens)


@triton.jit
def logit_of(keys):
    return logit((keys >> 20).to(tl.int32))


@triton.jit
def token_of(key):
    return LAST_ID - (key & LAST_ID)


@triton.jit
def load_logits(row_ptr, tokens, vocab):
    """fp32, and -inf behind the vocabulary."""
    return tl.load(row_ptr + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def real(params, column):
    """A parameter that is an fp64."""
    return tl.load(params + column).to(tl.float64, bitcast=True)


@triton.jit
def is_finite(logits):
    return tl.abs(logits) < float("inf")  # False for NaN


@triton.jit
def measures(tops, lows, params, spans, SPANS_PAD: tl.constexpr):
    """A row's highest logit, its temperature, min_p's bar, and bins per unit of score."""
    span = tl.arange(0, SPANS_PAD)
    seen = span < spans
    peak = logit_of(tl.max(tl.load(tops + span, mask=seen, other=-(1 << 62)), axis=0))
    low = logit(tl.min(tl.load(lows + span, mask=seen, other=0x7FFFFFFF), axis=0).to(tl.int32))
    temperature = real(params, TEMPERATURE).to(tl.float32)
    depth = tl.minimum(tl.div_rn(peak - low, temperature), REACH)
    steps = tl.div_rn(BINS - 2.0, tl.maximum(depth, 1e-30))  # the last bin holds no mass
    return peak, temperature, tl.load(params + BAR), steps


@triton.jit
def masses_and_bins(logits, peak, temperature, bar, steps):
    """floor(2**43 * exp((logit - peak) / temperature)), 0 below the bar, and where the score lies."""
    scores = tl.div_rn(logits - peak, temperature)
    mass = (tl.exp(scores) * MASS).to(tl.int64)
    bins = tl.minimum(-scores * steps, BINS - 1.0).to(tl.int32)
    return tl.where(mass < bar, 0, mass), bins
