"""Attention scores in Triton for K with per-channel scales, for tiles that lie within one block.

Scales are folded into the queries once per tile, and minimums into one number per query row, so codes need no
scaling. Two channels that share bits form one code of twice the width, read as two-byte words (see
gpu/words.py). Masks split it into its low bits and its high bits; the high bits are not shifted, so their
value is too large by a power of two.
"""

from typing import Any

import triton
import triton.language as tl

from kvq.kernels.attend.triton.means import MEANS_TOGETHER, means_at
from kvq.kernels.attend.triton.scales import runs_of
from kvq.kernels.attend.triton.words import LEAST_COLUMNS, added_dot, byte_parts, dot, even_and_odd, run_parts
from kvq.kernels.gpu.rows import CHANNEL, CHANNEL_INT8, INT8, PACKED, narrow_scale, takes_ptx
from kvq.kernels.gpu.stored import CENTER_STEP, MOST_PAIRED, shared_bits
from kvq.kernels.gpu.words import codes_a_byte, exponent, low_unit, plain, unit

ENLARGED = tl.constexpr(4)  # powers of two by which scales are larger, so that fp16 holds small ones


def is_paired(kind: Any, bits: Any, _semantic: Any = None) -> tl.constexpr:
    """Return True if channels share their bits in pairs."""
    return tl.constexpr(plain(kind) == CHANNEL.value and plain(bits) <= MOST_PAIRED.value)


def word_kind(kind: Any, bits: Any, _semantic: Any = None) -> tl.constexpr:
    """Return the kind of the codes in words, with a pair as one code; CHANNEL stands for 8 unsigned bits."""
    if plain(kind) == CHANNEL_INT8.value:
        return INT8
    width = plain(bits) * (2 if is_paired(kind, bits).value else 1)
    return CHANNEL if width == 8 else PACKED[width]


def channel_unit(kind: Any, bits: Any, compute: Any, _semantic: Any = None) -> tl.constexpr:
    """Return the factor by which scores must be multiplied."""
    lowest = low_unit(word_kind(kind, bits), compute, _semantic=_semantic).value
    return tl.constexpr(lowest / 2**ENLARGED.value)


for _function in (is_paired, word_kind, channel_unit):  # device code calls them with the compilation
    _function.__triton_builtin__ = True


@triton.jit
def _in_order(first, COUNT: tl.constexpr, FORWARDS: tl.constexpr):
    """Return a row's word indices, starting at `first` and wrapping around, and a mask of those in forward
    order: the first FORWARDS are in order, the others in reverse from the end."""
    word = (tl.arange(0, COUNT) + first) % COUNT
    is_before = word < FORWARDS
    return tl.where(is_before, word, COUNT + FORWARDS - 1 - word), is_before


@triton.jit
def _scale_bytes(words, first, DIM: tl.constexpr, N: tl.constexpr):
    """Return scale bytes, int32 [DIM], in the order of `channel_queries`: even elements, then odd ones; in
    each half, the first N / 2 channels, then their partners. With `first` = N / 4, the two are swapped."""
    word, is_before = _in_order(first, DIM // 4, N // 4)
    x = tl.load(words + word)
    backwards = (x << 24) | ((x & 0xFF00) << 8) | ((x >> 8) & 0xFF00) | ((x >> 24) & 0xFF)
    x = tl.where(is_before, x, backwards)[None, :, None]
    below = 8 * tl.arange(0, 2)[:, None, None] + 16 * tl.arange(0, 2)[None, None, :]
    return tl.reshape((x >> below) & 255, (DIM,))


@triton.jit
def _offsets(words, at, inside, KIND: tl.constexpr, DIM: tl.constexpr, N: tl.constexpr):
    """Return the offsets of blocks whose scales begin at word `at`, [blocks, DIM]: the first N in order, then
    the others in reverse. INT8 offsets are divided by 4 * CENTER_STEP to fit in fp16."""
    rows, mask = words + at[:, None], inside[:, None]
    if KIND == CHANNEL_INT8:
        word, below = tl.arange(0, DIM // 4)[None, :], 8 * tl.arange(0, 4)[None, None, :]
        byte = (tl.load(rows + word, mask=mask, other=0)[:, :, None] >> below) & 255
        step = tl.load(rows + (DIM // 4 + word), mask=mask, other=0)[:, :, None] >> below
        offset = step.to(tl.int8).to(tl.float32) * narrow_scale(byte) * 0.25
    else:
        word, is_before = _in_order(0, DIM // 2, N // 2)
        x = tl.load(rows + (DIM // 4 + word)[None, :], mask=mask, other=0)
        x = tl.where(is_before[None, :], x, (x << 16) | ((x >> 16) & 0xFFFF))
        halves = x[:, :, None] >> (16 * tl.arange(0, 2))[None, None, :]
        offset = halves.to(tl.int16).to(tl.float16, bitcast=True)
    return tl.reshape(offset, (at.shape[0], DIM))


@triton.jit
def _times_offsets(q, offsets, KIND: tl.constexpr):
    """Return q . offset for the offsets of several blocks, [blocks, DIM]: fp32 [rows, blocks]."""
    scores = dot(q, tl.trans(offsets.to(q.dtype)))
    return scores * (4.0 * CENTER_STEP) if KIND == CHANNEL_INT8 else scores


@triton.jit
def score_offsets(q, k, room, rows_at, valid, table, first, last, scales):
    """Store q . offset for the blocks [first, last) in `room`, starting at each row's `rows_at`."""
    N: tl.constexpr = k.dim // 2 if is_paired(k.kind, k.bits) else k.dim
    words = scales.to(tl.pointer_type(tl.int32), bitcast=True)
    for start in tl.range(first, last, MEANS_TOGETHER, num_stages=1):
        block, inside, at = means_at(table, start, last, k.scale_strides.block // 4)
        scores = _times_offsets(q, _offsets(words, at, inside, k.kind, k.dim, N), k.kind)
        tl.store(room + (rows_at[:, None] + block[None, :]), scores, mask=valid[:, None] & inside[None, :])
    tl.debug_barrier()  # other threads read them


@triton.jit
def added_offsets(q, k, scales):
    """Return q . offset for one block, fp32 [rows]."""
    words, own = scales.to(tl.pointer_type(tl.int32), bitcast=True), tl.arange(0, 1)
    N: tl.constexpr = k.dim // 2 if is_paired(k.kind, k.bits) else k.dim
    columns = tl.broadcast_to(_offsets(words, own, own == 0, k.kind, k.dim, N), (LEAST_COLUMNS, k.dim))
    return tl.max(_times_offsets(q, columns, k.kind), axis=1)  # all columns are equal


@triton.jit
def channel_queries(q, k):  # D131: channel scales multiply queries, once per tile
    """Split queries [ROWS, dim] into the parts that match runs of words; if paired, the second half is
    reversed.

    A product with the identity matrix gives the parts the layout of results, ready for direct multiplication.
    """
    PER: tl.constexpr = codes_a_byte(word_kind(k.kind, k.bits))
    cut = even_and_odd(q, PER, k.dim // PER // k.read.run, k.read.run, k.read.width)
    same = (tl.arange(0, k.read.width)[:, None] == tl.arange(0, k.read.width)[None, :]).to(q.dtype)
    parts = ()
    for i in tl.static_range(len(cut)):
        parts = parts + (dot(cut[i], same).to(q.dtype),)
    return parts


@triton.jit
def _once(x):
    """Return x, computed only once: the compiler recomputes cheap values for every layout that needs them,
    but not sums, whose order it preserves."""
    return tl.sum(tl.where(tl.arange(0, 2)[:, None] == 0, x, 0.0), axis=0)


@triton.jit
def _over(x, y):
    """Return x / y for numbers of moderate magnitude, without the checks for extreme ones."""
    if takes_ptx():
        x = tl.inline_asm_elementwise(
            "div.approx.ftz.f32 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        x = x / y
    return x


@triton.jit
def _fields(words, KIND: tl.constexpr, BITS: tl.constexpr, DIM: tl.constexpr, N: tl.constexpr,
    HIGHER: tl.constexpr, PER: tl.constexpr, COMPUTE: tl.constexpr):  # fmt: skip
    """Return each channel's mask within the code in a word, int16 [DIM], and the factor of its numbers,
    COMPUTE. HIGHER: number of bits between successive places of codes in a byte."""
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
        factor = _over(narrow_scale(byte) * (((1 << BITS) - 1) * 2**ENLARGED), field.to(tl.float32))
    field = field.to(tl.int16).to(tl.float16, bitcast=True)
    return _once(field).to(tl.int16, bitcast=True), _once(factor.to(COMPUTE))


@triton.jit
def _cut_in_two(part, field, COMPUTE: tl.constexpr):
    """Split codes, as numbers, into the bits selected by the mask `field`, int16, and all other bits."""
    if COMPUTE == tl.float32 or not takes_ptx():
        code = part.to(tl.int32)
        low = code & field.to(tl.int32)
        parts = (low.to(tl.float32).to(COMPUTE), (code - low).to(tl.float32).to(COMPUTE))
    else:
        parts = tl.inline_asm_elementwise(
            "and.b32 $0, $2, $3; xor.b32 $1, $2, $0;", "=&r,=&r,r,r", [part, field],
            dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return parts


@triton.jit
def channel_scores(q, k, tile):
    """Return q . k for one tile, fp32 [rows, keys], without offsets and without the factor `channel_unit`.
    `q`: the queries from `channel_queries`."""
    KIND: tl.constexpr = k.kind
    BITS: tl.constexpr = k.bits
    DIM: tl.constexpr = k.dim
    RUN: tl.constexpr = k.read.run
    WIDTH: tl.constexpr = k.read.width
    COMPUTE: tl.constexpr = k.read.compute
    WORDS: tl.constexpr = word_kind(KIND, BITS)
    PER: tl.constexpr = codes_a_byte(WORDS)
    HALVES: tl.constexpr = 2 if is_paired(KIND, BITS) else 1
    N: tl.constexpr = DIM // HALVES  # codes of a row
    RUNS: tl.constexpr = N // PER // RUN
    COUNT: tl.constexpr = 2 * HALVES * PER * RUNS
    SECOND: tl.constexpr = exponent(unit(WORDS, COMPUTE, min(1, PER - 1)))
    HIGHER: tl.constexpr = exponent(low_unit(WORDS, COMPUTE)) - SECOND
    words = tile.scales.to(tl.pointer_type(tl.int32), bitcast=True)
    field, factor = _fields(words, KIND, BITS, DIM, N, HIGHER, PER, COMPUTE)
    factors = runs_of(tl.reshape(factor, (1, DIM)), COUNT)
    fields = runs_of(tl.reshape(field, (1, DIM)), COUNT)
    scores = tl.zeros((q[0].shape[0], tile.inside.shape[0]), tl.float32)
    for j in tl.static_range(RUNS):
        if WORDS == INT8:
            parts = byte_parts(k, tile)
        else:
            parts = run_parts(tile.codes, tile.codes_at, tile.inside, WORDS, j * RUN, N, RUN, WIDTH, COMPUTE)
        for odd in tl.static_range(2):
            for i in tl.static_range(PER):
                own = (parts[odd * PER + i],)
                if HALVES == 2:
                    own = _cut_in_two(own[0], fields[(odd * HALVES * PER + i) * RUNS + j], COMPUTE)
                for half in tl.static_range(HALVES):
                    query = q[((odd * HALVES + half) * PER + i) * RUNS + j]
                    factor = factors[((odd * HALVES + half) * PER + i) * RUNS + j]
                    scores = added_dot(query * factor, tl.trans(own[half]), scores)
    return scores
