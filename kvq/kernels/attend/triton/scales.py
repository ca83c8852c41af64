"""Scales of quantized rows in Triton, as factors of scores and weights.

Only elements of at least four bytes are copied asynchronously, so scales are read as words. If a tensor has
fewer elements than a program has threads, the compiler makes each thread copy every element that it needs: 32
copies per thread for 64 keys, where one would suffice. Small tensors are therefore read as the first row, or
the first columns, of a tile with an element for every thread.
"""

from typing import Any

import triton
import triton.language as tl

from kvq.kernels.gpu.rows import narrow_scale, scale_and_minimum, takes_ptx
from kvq.kernels.gpu.words import plain

# Two tokens' words become their scales times 32.
# D127: every thread decodes the scales it reads
_NARROW_SCALES = tl.constexpr("""
{{
prmt.b32 $0, $1, $2, {bytes};
shl.b32 $0, $0, 7;
and.b32 $0, $0, 0x7f807f80;
}}
""")
_LOW_SCALES = tl.constexpr(_NARROW_SCALES.value.format(bytes="0x5410"))
_HIGH_SCALES = tl.constexpr(_NARROW_SCALES.value.format(bytes="0x7632"))


def wide_assembly(place: Any, exponent: Any, _semantic: Any = None) -> tl.constexpr:
    """Return assembly that converts a word's first or third byte to an fp32 scale times a power of two."""
    mask, factor = (("0xff", 1 << 20), ("0xff0000", 16))[plain(place)]
    added = (107 + plain(exponent)) << 23
    return tl.constexpr(f"""
{{
.reg .b32 byte;
and.b32 byte, $1, {mask};
mad.lo.u32 $0, byte, {factor}, {added};
}}
""")


def minimums_assembly(bits: Any, _semantic: Any = None) -> tl.constexpr:
    """Return assembly that converts two of a token's two-byte words to the exact fp16 minimums of two groups.

    It computes (1024 + 128 + the signed byte - 1152) * 2^(bits - 12) * the scale, which is 32 times too
    large; `bits`: bits of a code.
    """
    part, minus = 3 + plain(bits) << 10, 0xC480 + (plain(bits) - 4 << 10)
    return tl.constexpr(f"""
{{
.reg .b32 scale, part, minus;
mov.b32 part, 0x{part:04x}{part:04x};
mov.b32 minus, 0x{minus:04x}{minus:04x};
shl.b32 scale, $1, 7;
and.b32 scale, scale, 0x7f807f80;
xor.b32 $0, $1, 0x80008000;
prmt.b32 $0, $0, 0x64646464, 0x4341;
fma.rn.f16x2 $0, $0, part, minus;
mul.rn.f16x2 $0, $0, scale;
}}
""")


def is_narrow(scales: Any, _semantic: Any = None) -> tl.constexpr:
    """Return True if the words at a pointer contain pairs of bytes; such words are unsigned and have the
    pairs of two groups or, if rows have an odd number of groups, of one."""
    return tl.constexpr(scales.dtype.element_ty.is_int_unsigned())


for _function in (wide_assembly, minimums_assembly, is_narrow):  # device code calls them with the compilation
    _function.__triton_builtin__ = True


@triton.jit
def row_scales(rows, tile, SPREAD: tl.constexpr, WINDOW: tl.constexpr):
    """Return the scales of a tile's codes, fp16 [keys]; 0 for tokens outside the mask `inside`.

    SPREAD: number of rows of words that provides an element for every thread; 1 if there are enough keys.
    """
    scales, at, inside = tile.scales, tile.scales_at, tile.inside
    if rows.read.paired and SPREAD > 1:
        WORDS: tl.constexpr = at.shape[0] // 2
        of_even, of_odd = tl.split(tl.reshape(at, (WORDS, 2)))
        even, odd = tl.split(tl.reshape(inside, (WORDS, 2)))
        at = tl.where(even, of_even, of_odd)  # the same, unless the other's block was not looked up
        row = tl.arange(0, SPREAD)[:, None]
        words = tl.load(scales + (at[None, :] + row * 0), mask=(even | odd)[None, :] & (row == 0), other=0)
        words = _first_row(words, SPREAD)
        words = words & tl.where(odd, -1, 0xFFFF)
        if WINDOW:  # a window may begin between two
            words = words & tl.where(even, -1, -0x10000)
        low = words.to(tl.int16).to(tl.float16, bitcast=True)
        high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        scale = tl.reshape(tl.join(low, high), (2 * WORDS,))
    elif rows.read.paired:
        words = tl.load(scales + at, mask=inside, other=0)
        half = tl.where(tile.slot % 2 == 0, words, words >> 16).to(tl.int16)
        scale = half.to(tl.float16, bitcast=True)
    else:
        scale = tl.load(scales + at, mask=inside, other=0.0)
    return scale


@triton.jit
def _first_row(x, ROWS: tl.constexpr):
    """Return the first of x's ROWS rows; ROWS is a power of two."""
    if ROWS == 1:
        first = tl.reshape(x, (x.shape[1],))
    else:
        low, _ = tl.split(tl.permute(tl.reshape(x, (2, ROWS // 2, x.shape[1])), (1, 2, 0)))
        first = _first_row(low, ROWS // 2)
    return first


@triton.jit
def side_by_side(low, high):
    """Concatenate the columns of two tensors."""
    both = tl.permute(tl.join(low, high), (0, 2, 1))
    return tl.reshape(both, (low.shape[0], 2 * low.shape[1]))


@triton.jit
def runs_of(x, COUNT: tl.constexpr):
    """Split x [ROWS, columns] into COUNT runs of adjacent columns; COUNT is a power of two."""
    ROWS: tl.constexpr = x.shape[0]
    if COUNT == 1:
        cut = (x,)
    else:
        low, high = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, x.shape[1] // 2)), (0, 2, 1)))
        cut = runs_of(low, COUNT // 2) + runs_of(high, COUNT // 2)
    return cut


@triton.jit
def group_minimums(  # D126: minimums: one product with the queries' sums
    scales, at, inside, GROUPS: tl.constexpr, PAIRS: tl.constexpr, COMPUTE: tl.constexpr, BITS: tl.constexpr
):
    """Return the minimums of all groups of some tokens, COMPUTE [keys, PAIRS], padded with zeros: narrow
    minimums in every column, others in every second column, with scales between them.
    """
    col = tl.arange(0, PAIRS)
    if is_narrow(scales):
        PER: tl.constexpr = scales.dtype.element_ty.primitive_bitwidth // 16
        words = scales.to(tl.pointer_type(tl.int16), bitcast=True)
        mask = inside[:, None] & (col < GROUPS)[None, :]
        pairs = tl.load(words + ((PER * at)[:, None] + col[None, :]), mask=mask, other=0)
        if COMPUTE == tl.float16 and takes_ptx():
            pairs = tl.inline_asm_elementwise(
                minimums_assembly(BITS), "=&r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2
            )
        else:
            _, pairs = scale_and_minimum(pairs, BITS)
            pairs = pairs.to(COMPUTE)
    else:
        halves = scales.to(tl.pointer_type(tl.float16), bitcast=True)
        mask = inside[:, None] & (col < 2 * GROUPS)[None, :]
        pairs = tl.load(halves + ((2 * at)[:, None] + col[None, :]), mask=mask, other=0.0).to(COMPUTE)
    return pairs


@triton.jit
def group_words(scales, at, inside, GROUPS: tl.constexpr, SPREAD: tl.constexpr):
    """Return 32-bit words with the scales of all groups of some tokens, [keys] each; narrow scales are two
    per word.
    SPREAD: as for `row_scales`.

    A few words are read as one tile; more would take too many registers, and so would words that are read
    before the product of the minimums, with Triton 3.7.1.
    """
    parts = ()
    WORDS: tl.constexpr = GROUPS // 2 if scales.dtype.element_ty == tl.uint32 else GROUPS
    if scales.dtype.element_ty == tl.uint16:
        for i in tl.static_range(WORDS):
            parts = parts + (tl.load(scales + (at + i), mask=inside, other=0),)
    elif WORDS <= 2 or (WORDS <= 4 and SPREAD > 1):
        COUNT: tl.constexpr = max(4 if WORDS == 3 else WORDS, SPREAD // 2)
        col = tl.arange(0, COUNT)
        mask = inside[:, None] & (col < WORDS)[None, :]
        words = tl.load(scales + (at[:, None] + col[None, :]), mask=mask, other=0)
        cut = runs_of(words, COUNT)
        for i in tl.static_range(WORDS):
            parts = parts + (tl.reshape(cut[i], (at.shape[0],)),)
    else:
        for i in tl.static_range(WORDS):
            parts = parts + (tl.load(scales + (at + i), mask=inside, other=0),)
    return parts


@triton.jit
def wide_scale(words, GROUP: tl.constexpr, EXPONENT: tl.constexpr):
    """Return a group's scale from the tokens' words, fp32 [keys], times 2**EXPONENT."""
    if words[0].dtype == tl.int32:
        scale = words[GROUP].to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 2.0**EXPONENT
    else:
        PER: tl.constexpr = words[0].dtype.primitive_bitwidth // 16
        word = words[GROUP // PER].to(tl.uint32)
        if takes_ptx():
            scale = tl.inline_asm_elementwise(
                wide_assembly(GROUP % PER, EXPONENT), "=r,r", [word], dtype=tl.float32, is_pure=True, pack=1
            )
        else:
            byte = (word >> (GROUP % PER * 16)) & 255
            scale = narrow_scale(byte.to(tl.int32)) * 2.0**EXPONENT
    return scale


@triton.jit
def half_scale(words, GROUP: tl.constexpr, COMPUTE: tl.constexpr):
    """Return a group's scale from its words, fp16 or fp32 [keys]; narrow ones are 32 times too large."""
    if words[0].dtype == tl.int32:
        scale = words[GROUP].to(tl.int16).to(tl.float16, bitcast=True)
    elif COMPUTE == tl.float16 and takes_ptx() and words[0].shape[0] > 1:
        PER: tl.constexpr = words[0].dtype.primitive_bitwidth // 16
        scale = tl.inline_asm_elementwise(
            _HIGH_SCALES if GROUP % PER == 1 else _LOW_SCALES,
            "=&r,r,r", [words[GROUP // PER].to(tl.uint32)], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        scale = wide_scale(words, GROUP, 5)
    return scale


@triton.jit
def scaled(weights, scale):  # D122: V's scales multiply probabilities in fp16
    """Return weights [rows, keys] times a scale [keys], in the weights' dtype."""
    return weights * scale.to(weights.dtype)[None, :]
