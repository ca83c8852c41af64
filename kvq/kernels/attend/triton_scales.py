"""Scales of quantized rows in Triton, as scores and weights are multiplied by them.

Only elements of four bytes and more are copied asynchronously, so scales are read as words. And a tensor of
fewer elements than a program has threads is one that the compiler lets many threads copy, each of them all
that it needs: 32 copies a thread for 64 keys, where one would do. So small ones are read as the first row, or
the first columns, of a tile with an element for every thread.
"""

import triton
import triton.language as tl

from kvq.kernels.gpu.rows import scale_and_minimum, takes_ptx

# Two groups' words of 16 bits become two fp16 scales and two fp16 minimums, without a loss: a scale by way of
# fp32, a minimum as its byte over 8 (of 1024 + 128 + byte, over 8, 144 are too many) times the scale.
_NARROW_INT4 = tl.constexpr("""
{
.reg .b32 low, high, magic, eighth, minus;
mov.b32 eighth, 0x30003000;
mov.b32 minus, 0xd880d880;
and.b32 low, $2, 0xff;
shr.u32 high, $2, 16;
and.b32 high, high, 0xff;
shl.b32 low, low, 20;
shl.b32 high, high, 20;
add.u32 low, low, 0x35800000;
add.u32 high, high, 0x35800000;
cvt.rn.f16x2.f32 $0, high, low;
xor.b32 magic, $2, 0x80008000;
prmt.b32 magic, magic, 0x64646464, 0x4341;
fma.rn.f16x2 magic, magic, eighth, minus;
mul.rn.f16x2 $1, magic, $0;
}
""")


@triton.jit
def row_scales(scales, at, slot, inside, PAIRED: tl.constexpr, SPREAD: tl.constexpr, WINDOW: tl.constexpr):
    """What codes of those tokens are multiplied by, fp16 [keys]; 0 of tokens that are not `inside`.

    PAIRED: `scales` are words of two neighbouring tokens. SPREAD: rows of words that have an element for
    every thread, of which the first is read; 1: there are keys enough.
    """
    if PAIRED and SPREAD > 1:
        WORDS: tl.constexpr = at.shape[0] // 2
        of_even, of_odd = tl.split(tl.reshape(at, (WORDS, 2)))
        even, odd = tl.split(tl.reshape(inside, (WORDS, 2)))
        at = tl.where(even, of_even, of_odd)  # the same, but where the other's block was not looked up
        row = tl.arange(0, SPREAD)[:, None]
        words = tl.load(scales + (at[None, :] + row * 0), mask=(even | odd)[None, :] & (row == 0), other=0)
        words = _first_row(words, SPREAD)
        words = words & tl.where(odd, -1, 0xFFFF)
        if WINDOW:  # may begin between two
            words = words & tl.where(even, -1, -0x10000)
        low = words.to(tl.int16).to(tl.float16, bitcast=True)
        high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        scale = tl.reshape(tl.join(low, high), (2 * WORDS,))
    elif PAIRED:
        words = tl.load(scales + at, mask=inside, other=0)
        half = tl.where(slot % 2 == 0, words, words >> 16).to(tl.int16)
        scale = half.to(tl.float16, bitcast=True)
    else:
        scale = tl.load(scales + at, mask=inside, other=0.0)
    return scale


@triton.jit
def _first_row(x, ROWS: tl.constexpr):
    """The first of ROWS rows of x, a power of two."""
    if ROWS == 1:
        first = tl.reshape(x, (x.shape[1],))
    else:
        low, _ = tl.split(tl.permute(tl.reshape(x, (2, ROWS // 2, x.shape[1])), (1, 2, 0)))
        first = _first_row(low, ROWS // 2)
    return first


@triton.jit
def side_by_side(low, high):
    """The columns of two, side by side."""
    both = tl.permute(tl.join(low, high), (0, 2, 1))
    return tl.reshape(both, (low.shape[0], 2 * low.shape[1]))


@triton.jit
def runs_of(x, COUNT: tl.constexpr):
    """x [ROWS, columns] as COUNT runs of neighbouring columns, COUNT a power of two."""
    ROWS: tl.constexpr = x.shape[0]
    if COUNT == 1:
        cut = (x,)
    else:
        low, high = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, x.shape[1] // 2)), (0, 2, 1)))
        cut = runs_of(low, COUNT // 2) + runs_of(high, COUNT // 2)
    return cut


@triton.jit
def narrow_factors(scales, at, inside, GROUPS: tl.constexpr, COMPUTE: tl.constexpr):
    """Scales and minimums of all groups of those tokens, [keys, groups] and zeros each, if they are words of
    two bytes, of which one thread makes two numbers; none of wider words, which are read by themselves.
    """
    both = ()
    if scales.dtype.element_ty == tl.int16:
        col = tl.arange(0, triton.next_power_of_2(GROUPS))
        mask = inside[:, None] & (col < GROUPS)[None, :]
        words = tl.load(scales + (at[:, None] + col[None, :]), mask=mask, other=0)
        if COMPUTE == tl.float16 and takes_ptx():
            both = tl.inline_asm_elementwise(
                _NARROW_INT4, "=&r,=&r,r", [words], dtype=(tl.float16, tl.float16), is_pure=False, pack=2
            )
        else:
            both = scale_and_minimum(words, 4)
    return both


@triton.jit
def group_minimums(
    both, scales, at, inside, GROUPS: tl.constexpr, PAIRS: tl.constexpr, COMPUTE: tl.constexpr
):
    """COMPUTE [keys, PAIRS] with the minimums of all groups of those tokens: of `both`, one a column, else in
    every other one, with scales between; zeros follow.
    """
    if len(both) > 0:
        pairs = _padded(both[1].to(COMPUTE), PAIRS)
    else:
        col = tl.arange(0, PAIRS)
        halves = scales.to(tl.pointer_type(tl.float16), bitcast=True)
        mask = inside[:, None] & (col < 2 * GROUPS)[None, :]
        pairs = tl.load(halves + ((2 * at)[:, None] + col[None, :]), mask=mask, other=0.0).to(COMPUTE)
    return pairs


@triton.jit
def _padded(x, COLUMNS: tl.constexpr):
    """x with zeros for further columns; all numbers of columns are powers of two."""
    if x.shape[1] < COLUMNS:
        x = _padded(side_by_side(x, tl.zeros(x.shape, x.dtype)), COLUMNS)
    return x


@triton.jit
def group_scales(both, scales, at, inside, GROUPS: tl.constexpr, SPREAD: tl.constexpr):
    """The scales of all groups of those tokens, [keys] each. SPREAD: of `row_scales`.

    Few that are not of `both` are read as one tile of words; more would take registers. Read before the
    product of the minimums they take registers, too, with Triton 3.7.1.
    """
    parts = ()
    if len(both) > 0:
        cut = runs_of(both[0], both[0].shape[1])
        for i in tl.static_range(GROUPS):
            parts = parts + (tl.reshape(cut[i], (at.shape[0],)),)
    elif GROUPS <= 2 or (GROUPS <= 4 and SPREAD > 1):
        COUNT: tl.constexpr = max(4 if GROUPS == 3 else GROUPS, SPREAD // 2)
        col = tl.arange(0, COUNT)
        mask = inside[:, None] & (col < GROUPS)[None, :]
        words = tl.load(scales + (at[:, None] + col[None, :]), mask=mask, other=0)
        cut = runs_of(words, COUNT)
        for i in tl.static_range(GROUPS):
            word = tl.reshape(cut[i], (at.shape[0],))
            parts = parts + (word.to(tl.int16).to(tl.float16, bitcast=True),)
    else:
        for i in tl.static_range(GROUPS):
            word = tl.load(scales + (at + i), mask=inside, other=0)
            parts = parts + (word.to(tl.int16).to(tl.float16, bitcast=True),)
    return parts


@triton.jit
def scaled(weights, scale):
    """Weights [rows, keys] times a scale [keys], in the weights' dtype."""
    return weights * scale.to(weights.dtype)[None, :]
