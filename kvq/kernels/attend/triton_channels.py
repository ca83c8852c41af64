"""Scores over rows of K with scales per channel in Triton, where a tile lies in one block.

Scales go to the queries, once a tile, and minimums to one number a query row: codes are multiplied as they
lie. Two channels that share their bits are one code of twice the bits, read as words of two bytes (see
gpu/words.py) and cut in two by masks: its low bits, and its others where they are, a power of two too large.
"""

from typing import Any

import triton
import triton.language as tl

from kvq.kernels.attend.triton_words import LEAST_COLUMNS, added_dot, even_and_odd, run_of_words, run_parts
from kvq.kernels.gpu.rows import (
    CENTER_STEP,
    CHANNEL,
    CHANNEL_INT8,
    INT8,
    MOST_PAIRED,
    PACKED,
    channel_scale,
    narrow_scale,
    shared_bits,
    takes_ptx,
)
from kvq.kernels.gpu.words import codes_a_byte, exponent, low_unit, plain, unit, word_parts

ENLARGED = tl.constexpr(4)  # powers of two by which scales are larger, so that fp16 holds small ones

_CUT = tl.constexpr("""
{
and.b32 $0, $2, $3;
xor.b32 $1, $2, $0;
}
""")


def is_paired(kind: Any, bits: Any, _semantic: Any = None) -> tl.constexpr:
    """Whether two channels share their bits."""
    return tl.constexpr(plain(kind) == CHANNEL.value and plain(bits) <= MOST_PAIRED.value)


def word_kind(kind: Any, bits: Any, _semantic: Any = None) -> tl.constexpr:
    """The kind of codes that words hold, two of a pair in one; CHANNEL: of 8 bits without a sign."""
    if plain(kind) == CHANNEL_INT8.value:
        return INT8
    width = plain(bits) * (2 if is_paired(kind, bits).value else 1)
    return CHANNEL if width == 8 else PACKED[width]


def channel_unit(kind: Any, bits: Any, compute: Any, _semantic: Any = None) -> tl.constexpr:
    """What scores are to be multiplied by."""
    lowest = low_unit(word_kind(kind, bits), compute, _semantic=_semantic).value
    return tl.constexpr(lowest / 2**ENLARGED.value)


for _function in (is_paired, word_kind, channel_unit):  # device code calls them with the compilation
    _function.__triton_builtin__ = True


@triton.jit
def _elements(words, at, WIDTH: tl.constexpr, BACKWARDS: tl.constexpr):
    """Elements of WIDTH bits of the words int32 `at`, sign-extended, int32 [1, elements]; or backwards."""
    PER: tl.constexpr = 32 // WIDTH
    own = tl.arange(0, PER)
    left = own if BACKWARDS else PER - 1 - own  # bits above an element, over WIDTH
    x = (tl.load(words + at)[:, None] << (left * WIDTH)[None, :]) >> (32 - WIDTH)
    return tl.reshape(x, (1, PER * at.shape[0]))


@triton.jit
def _scale_bytes(words, N: tl.constexpr, DIM: tl.constexpr, BACKWARDS: tl.constexpr):
    """Scale bytes of the first N channels or, backwards, of the last ones, int32 [1, N]."""
    word = tl.arange(0, N // 4)
    return _elements(words, DIM // 4 - 1 - word if BACKWARDS else word, 8, BACKWARDS) & 255


@triton.jit
def _offsets(words, N: tl.constexpr, DIM: tl.constexpr, KIND: tl.constexpr, COMPUTE: tl.constexpr,
    BACKWARDS: tl.constexpr):  # fmt: skip
    """Minimums of those channels, or of INT8 what is added to codes, COMPUTE [1, N]."""
    if KIND == CHANNEL_INT8:
        x = (_elements(words + DIM // 4, tl.arange(0, N // 4), 8, False) * CENTER_STEP).to(tl.float32)
    else:
        word = tl.arange(0, N // 2)
        at = DIM // 2 - 1 - word if BACKWARDS else word
        x = _elements(words + DIM // 4, at, 16, BACKWARDS).to(tl.int16).to(tl.float16, bitcast=True)
    return x.to(COMPUTE)


@triton.jit
def _cut_in_two(part, mask, COMPUTE: tl.constexpr):
    """Numbers of codes -> those of the bits in a mask int16, and of the others."""
    if COMPUTE == tl.float32 or not takes_ptx():
        code = part.to(tl.int32)
        low = code & mask.to(tl.int32)
        parts = (low.to(tl.float32).to(COMPUTE), (code - low).to(tl.float32).to(COMPUTE))
    else:
        parts = tl.inline_asm_elementwise(
            _CUT, "=&r,=&r,r,r", [part, mask], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    return parts


@triton.jit
def channel_queries(
    q, KIND: tl.constexpr, BITS: tl.constexpr, DIM: tl.constexpr, RUN: tl.constexpr, WIDTH: tl.constexpr
):
    """Queries [ROWS, DIM] as runs of words have them; of pairs the second half is backwards."""
    PER: tl.constexpr = codes_a_byte(word_kind(KIND, BITS))
    return even_and_odd(q, PER, DIM // PER // RUN, RUN, WIDTH)


@triton.jit
def _factors(
    words, place, KIND: tl.constexpr, BITS: tl.constexpr, DIM: tl.constexpr, N: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """What queries are multiplied by for the low part of every code and, of pairs, for its other part,
    COMPUTE [1, N] each, and the mask of the low part; `place`: bits that they lie too high, [N]."""
    byte = _scale_bytes(words, N, DIM, False)
    unit = ((-place + (127 + ENLARGED)) << 23).to(tl.float32, bitcast=True)[None, :]
    mask = byte
    if is_paired(KIND, BITS):
        other = _scale_bytes(words, N, DIM, True)
        own = shared_bits(byte, other, BITS)
        mask = (((1 << own) - 1) << place[None, :]).to(tl.int16)
        high = channel_scale(other, 2 * BITS - own, BITS) * ((127 - own) << 23).to(tl.float32, bitcast=True)
        factors = ((channel_scale(byte, own, BITS) * unit).to(COMPUTE), (high * unit).to(COMPUTE))
    else:
        factors = ((narrow_scale(byte) * unit).to(COMPUTE),)
    return factors, mask


@triton.jit
def channel_scores(
    q, codes, scales, codes_at, inside,
    KIND: tl.constexpr, BITS: tl.constexpr, DIM: tl.constexpr, RUN: tl.constexpr, WIDTH: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """q . k of one tile, fp32 [rows, keys], and what is added to all of a row, [rows], to be multiplied by
    `channel_unit`; `q`: of `channel_queries`, `scales`: those of its block."""
    WORDS: tl.constexpr = word_kind(KIND, BITS)
    PER: tl.constexpr = codes_a_byte(WORDS)
    HALVES: tl.constexpr = 2 if is_paired(KIND, BITS) else 1
    N: tl.constexpr = DIM // HALVES  # codes of a row
    RUNS: tl.constexpr = N // PER // RUN
    HIGHER: tl.constexpr = exponent(low_unit(WORDS, COMPUTE)) - exponent(
        unit(WORDS, COMPUTE, min(1, PER - 1))
    )
    words = scales.to(tl.pointer_type(tl.int32), bitcast=True)
    place = tl.arange(0, N) // (N // PER) * HIGHER
    factors, mask = _factors(words, place, KIND, BITS, DIM, N, COMPUTE)
    of_codes = even_and_odd(factors[0], PER, RUNS, RUN, WIDTH)
    offsets = even_and_odd(_offsets(words, N, DIM, KIND, COMPUTE, False), PER, RUNS, RUN, WIDTH)
    masks = ()
    if HALVES == 2:
        masks = even_and_odd(mask, PER, RUNS, RUN, WIDTH)
        of_codes = of_codes + even_and_odd(factors[1], PER, RUNS, RUN, WIDTH)
        offsets = offsets + even_and_odd(
            _offsets(words, N, DIM, KIND, COMPUTE, True), PER, RUNS, RUN, WIDTH
        )  # fmt: skip
    scores = tl.zeros((q[0].shape[0], inside.shape[0]), tl.float32)
    added = tl.zeros((q[0].shape[0], LEAST_COLUMNS), tl.float32)
    for j in tl.static_range(RUNS):
        if WORDS == INT8:
            parts = word_parts(run_of_words(codes, codes_at, inside, 0, DIM, WIDTH), (), INT8, COMPUTE, 0)
        else:
            parts = run_parts(codes, codes_at, inside, WORDS, j * RUN, N, RUN, WIDTH, COMPUTE)
        for odd in tl.static_range(2):
            for i in tl.static_range(PER):
                own = (parts[odd * PER + i],)
                if HALVES == 2:
                    own = _cut_in_two(own[0], masks[(odd * PER + i) * RUNS + j], COMPUTE)
                for half in tl.static_range(HALVES):
                    query = q[((odd * HALVES + half) * PER + i) * RUNS + j]
                    scaled = query * of_codes[((half * 2 + odd) * PER + i) * RUNS + j]
                    scores = added_dot(scaled, tl.trans(own[half]), scores)
                    offset = offsets[((half * 2 + odd) * PER + i) * RUNS + j]
                    offset = tl.trans(tl.broadcast_to(offset, (LEAST_COLUMNS, WIDTH)))
                    added = added_dot(scaled if KIND == CHANNEL_INT8 else query, offset, added)
    row = tl.max(added, axis=1)  # all columns are alike
    if KIND == CHANNEL:
        row = row * (1 / channel_unit(KIND, BITS, COMPUTE))
    return scores, row
