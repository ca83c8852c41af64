"""Scores over rows of K with scales per channel in Triton, where a tile lies in one block.

Scales go to the queries, once a tile, and minimums to one number a query row: codes are multiplied as they
lie. Two channels that share their bits are one code of twice the bits, read as words of two bytes (see
gpu/words.py) and cut in two by masks: its low bits, and its others where they are, a power of two too large.
"""

from typing import Any

import triton
import triton.language as tl

from kvq.kernels.attend.triton_scales import runs_of
from kvq.kernels.attend.triton_words import LEAST_COLUMNS, added_dot, dot, even_and_odd, run_of_words, run_parts
from kvq.kernels.gpu.rows import (
    CENTER_STEP,
    CHANNEL,
    CHANNEL_INT8,
    INT8,
    MOST_PAIRED,
    PACKED,
    narrow_scale,
    shared_bits,
    takes_ptx,
)
from kvq.kernels.gpu.words import codes_a_byte, exponent, low_unit, plain, unit, word_parts

ENLARGED = tl.constexpr(4)  # powers of two by which scales are larger, so that fp16 holds small ones


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
def _words_of(words, first, COUNT: tl.constexpr, FORWARDS: tl.constexpr):
    """COUNT words int32, from `first` on and then from the first one: FORWARDS of them in their order, the
    others backwards from the end; and which are those FORWARDS."""
    word = (tl.arange(0, COUNT) + first) % COUNT
    is_before = word < FORWARDS
    return tl.load(words + tl.where(is_before, word, COUNT + FORWARDS - 1 - word)), is_before


@triton.jit
def _scale_bytes(words, first, DIM: tl.constexpr, N: tl.constexpr):
    """Scale bytes int32 [DIM] in the order of `channel_queries`: of even elements, then of odd ones, of each
    the first N / 2 and then those that share their bits with them. `first`: N / 4 changes their places."""
    word, is_before = _words_of(words, first, DIM // 4, N // 4)
    own = tl.arange(0, 2)[:, None, None] + 2 * tl.arange(0, 2)[None, None, :]
    below = 8 * tl.where(is_before[None, :, None], own, 3 - own)
    return tl.reshape((word[None, :, None] >> below) & 255, (DIM,))


@triton.jit
def _minimums(words, DIM: tl.constexpr, N: tl.constexpr):
    """fp16 [1, DIM], the first N as they lie, then the others backwards."""
    word, is_before = _words_of(words, 0, DIM // 2, N // 2)
    half = tl.arange(0, 2)[None, :]
    below = 16 * tl.where(is_before[:, None], half, 1 - half)
    return tl.reshape((word[:, None] >> below).to(tl.int16).to(tl.float16, bitcast=True), (1, DIM))


@triton.jit
def channel_queries(
    q, KIND: tl.constexpr, BITS: tl.constexpr, DIM: tl.constexpr, RUN: tl.constexpr, WIDTH: tl.constexpr
):
    """Queries [ROWS, DIM], of pairs the second half backwards, as runs of words have them.

    Products leave them in the layout of results, in which they may be scaled and multiplied again as they are.
    """
    PER: tl.constexpr = codes_a_byte(word_kind(KIND, BITS))
    cut = even_and_odd(q, PER, DIM // PER // RUN, RUN, WIDTH)
    same = (tl.arange(0, WIDTH)[:, None] == tl.arange(0, WIDTH)[None, :]).to(q.dtype)
    parts = ()
    for i in tl.static_range(len(cut)):
        parts = parts + (dot(cut[i], same).to(q.dtype),)
    return parts


@triton.jit
def _once(x):
    """Numbers x, computed once: the compiler computes again what is cheap, in every layout that is asked for
    and in all threads that hold a copy there, but for sums, whose order it keeps."""
    return tl.sum(tl.where(tl.arange(0, 2)[:, None] == 0, x, 0.0), axis=0)


@triton.jit
def _fields(words, KIND: tl.constexpr, BITS: tl.constexpr, DIM: tl.constexpr, N: tl.constexpr,
    HIGHER: tl.constexpr, PER: tl.constexpr, COMPUTE: tl.constexpr):  # fmt: skip
    """Of every channel: its bits in a word's code, int16 [DIM], and what numbers of them are multiplied by,
    COMPUTE. HIGHER: bits that codes lie higher from place to place of their bytes."""
    byte = _scale_bytes(words, 0, DIM, N)
    own = byte * 0 + BITS
    at = tl.arange(0, DIM) % (DIM // 2)
    field = (1 << own) - 1
    if N < DIM:
        own = shared_bits(byte, _scale_bytes(words, N // 4, DIM, N), BITS)
        field = tl.where(at < N // 2, (1 << own) - 1, (1 << 2 * BITS) - (1 << 2 * BITS - own))
    field = field << at % (N // 2) // (N // 2 // PER) * HIGHER
    if KIND == CHANNEL_INT8:
        factor = narrow_scale(byte) * 2**ENLARGED
    else:
        factor = narrow_scale(byte) * (((1 << BITS) - 1) * 2**ENLARGED) / field.to(tl.float32)
    field = field.to(tl.int16).to(tl.float16, bitcast=True)
    return _once(field).to(tl.int16, bitcast=True), _once(factor.to(COMPUTE))


@triton.jit
def _added(q, words, DIM: tl.constexpr, N: tl.constexpr, KIND: tl.constexpr):
    """What offsets add to all keys of a block, fp32 [rows]."""
    if KIND == CHANNEL_INT8:
        word, below = tl.arange(0, DIM // 4), 8 * tl.arange(0, 4)[None, :]
        byte = (tl.load(words + word)[:, None] >> below) & 255
        step = (tl.load(words + DIM // 4 + word)[:, None] >> below).to(tl.int8).to(tl.float32)
        offset = tl.reshape(step * narrow_scale(byte) * 0.25, (1, DIM))  # as fp16 holds all
    else:
        offset = _minimums(words + DIM // 4, DIM, N)
    columns = tl.broadcast_to(offset.to(q.dtype), (LEAST_COLUMNS, DIM))
    added = tl.max(dot(q, tl.trans(columns)), axis=1)  # columns are alike
    return added * (4.0 * CENTER_STEP) if KIND == CHANNEL_INT8 else added


@triton.jit
def _field_of(part, field, COMPUTE: tl.constexpr):
    """Numbers of codes -> those of some of their bits, int16."""
    if COMPUTE == tl.float32 or not takes_ptx():
        own = (part.to(tl.int32) & field.to(tl.int32)).to(tl.float32).to(COMPUTE)
    else:
        own = tl.inline_asm_elementwise(
            "and.b32 $0, $1, $2;", "=r,r,r", [part, field], dtype=tl.float16, is_pure=True, pack=2
        )
    return own


@triton.jit
def channel_scores(
    q, runs, codes, scales, codes_at, inside,
    KIND: tl.constexpr, BITS: tl.constexpr, DIM: tl.constexpr, RUN: tl.constexpr, WIDTH: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """q . k of one tile, fp32 [rows, keys], to be multiplied by `channel_unit`, and what is added to all keys
    of a row then, [rows]; `runs`: of `channel_queries`, `scales`: of the tile's block."""
    WORDS: tl.constexpr = word_kind(KIND, BITS)
    PER: tl.constexpr = codes_a_byte(WORDS)
    HALVES: tl.constexpr = 2 if is_paired(KIND, BITS) else 1
    N: tl.constexpr = DIM // HALVES  # codes of a row
    RUNS: tl.constexpr = N // PER // RUN
    COUNT: tl.constexpr = 2 * HALVES * PER * RUNS
    HIGHER: tl.constexpr = exponent(low_unit(WORDS, COMPUTE)) - exponent(unit(WORDS, COMPUTE, min(1, PER - 1)))
    words = scales.to(tl.pointer_type(tl.int32), bitcast=True)
    field, factor = _fields(words, KIND, BITS, DIM, N, HIGHER, PER, COMPUTE)
    factors = runs_of(tl.reshape(factor, (1, DIM)), COUNT)
    fields = runs_of(tl.reshape(field, (1, DIM)), COUNT)
    scores = tl.zeros((q.shape[0], inside.shape[0]), tl.float32)
    for j in tl.static_range(RUNS):
        if WORDS == INT8:
            parts = word_parts(run_of_words(codes, codes_at, inside, 0, DIM, WIDTH), (), INT8, COMPUTE, 0)
        else:
            parts = run_parts(codes, codes_at, inside, WORDS, j * RUN, N, RUN, WIDTH, COMPUTE)
        for odd in tl.static_range(2):
            for i in tl.static_range(PER):
                for half in tl.static_range(HALVES):
                    query = runs[((odd * HALVES + half) * PER + i) * RUNS + j]
                    factor = factors[((odd * HALVES + half) * PER + i) * RUNS + j]
                    part = parts[odd * PER + i]
                    if HALVES == 2:
                        part = _field_of(part, fields[((odd * HALVES + half) * PER + i) * RUNS + j], COMPUTE)
                    scores = added_dot(query * factor, tl.trans(part), scores)
    return scores, _added(q, words, DIM, N, KIND)
