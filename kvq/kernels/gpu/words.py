"""Device functions for codes that are read two bytes at a time, as 16-bit words.

Tensor cores take 16-bit numbers, and `ldmatrix` brings 16-bit elements from shared memory straight to the
registers where a product wants them. So packed bytes travel as words, and become numbers behind it, in
registers: a word's even byte gives one operand, its odd byte another, of products that are summed or that
make every other column of the output. The assembly is pure, so that the compiler may move it there.
"""

import math
from typing import Any

import triton
import triton.language as tl

from kvq.kernels.gpu.rows import FP8, INT2, INT4, INT8, SPREAD_E4M3, SPREAD_INT8, fp8_codes, takes_ptx

# Powers of two by which probabilities are enlarged where they are fp16, before V's scales multiply them:
# these are small numbers, but nothing may overflow with the largest that rows of fp16 have.
_ENLARGEMENT = {INT4.value: 4.0, INT2.value: 4.0, INT8.value: 7.0, FP8.value: 8.0}
_LEAST_WITH_E4M3 = 89  # the first capability that converts FP8 by an instruction

# Inputs are two neighbouring words, of bytes 0 to 3; outputs are fp16 numbers of both words.
_INT8 = tl.constexpr(SPREAD_INT8.format(first="0x4240", second="0x4341"))
_E4M3 = tl.constexpr("""
{
.reg .b16 even, odd;
.reg .b32 sorted;
prmt.b32 sorted, $2, 0, 0x3120;
mov.b32 {even, odd}, sorted;
cvt.rn.f16x2.e4m3x2 $0, even;
cvt.rn.f16x2.e4m3x2 $1, odd;
}
""")
_E4M3_IN_ORDER = tl.constexpr("""
{
.reg .b16 first, second;
mov.b32 {first, second}, $2;
cvt.rn.f16x2.e4m3x2 $0, first;
cvt.rn.f16x2.e4m3x2 $1, second;
}
""")
_E4M3_BY_BITS = tl.constexpr(SPREAD_E4M3.format(first="0x2404", second="0x3414"))  # the value over 256
# INT4: a nibble at the low end of fp16's mantissa is the subnormal number code * 2^-24, one 4 bits further up
# 16 times that. Tensor cores multiply subnormal fp16 numbers exactly (Fasi et al., "Numerical behavior of
# NVIDIA tensor cores", 2021, section 4).
_INT4 = tl.constexpr("""
{
.reg .b32 odd;
shr.u32 odd, $4, 8;
and.b32 $0, $4, 0x000f000f;
and.b32 $1, $4, 0x00f000f0;
and.b32 $2, odd, 0x000f000f;
and.b32 $3, odd, 0x00f000f0;
}
""")
# INT2 likewise: numbers at four places.
_INT2 = tl.constexpr("""
{
.reg .b32 odd;
shr.u32 odd, $8, 8;
and.b32 $0, $8, 0x00030003;
and.b32 $1, $8, 0x000c000c;
and.b32 $2, $8, 0x00300030;
and.b32 $3, $8, 0x00c000c0;
and.b32 $4, odd, 0x00030003;
and.b32 $5, odd, 0x000c000c;
and.b32 $6, odd, 0x00300030;
and.b32 $7, odd, 0x00c000c0;
}
""")


def converts_e4m3(_semantic: Any = None) -> tl.constexpr:
    """Whether the GPU that code is being compiled for converts FP8 by an instruction."""
    if not takes_ptx(_semantic=_semantic).value:
        return tl.constexpr(False)
    return tl.constexpr(int(_semantic.builder.options.arch.removeprefix("sm")) >= _LEAST_WITH_E4M3)


def low_unit(kind: Any, compute: Any, _semantic: Any = None) -> tl.constexpr:
    """What the numbers of `word_parts` are to be multiplied by to be the values of codes."""
    by_bits = plain(compute) == tl.float16 and takes_ptx(_semantic=_semantic).value
    if plain(kind) == FP8.value:
        return tl.constexpr(1.0 if by_bits and converts_e4m3(_semantic=_semantic).value else 256.0)
    return tl.constexpr(2.0**24 if by_bits and plain(kind) in (INT4.value, INT2.value) else 1.0)


def unit(kind: Any, compute: Any, place: Any, _semantic: Any = None) -> tl.constexpr:
    """The same for codes at a place in their bytes, 0 for the lowest bits."""
    lowest = low_unit(kind, compute, _semantic=_semantic).value
    bits = 8 // codes_a_byte(kind).value
    return tl.constexpr(lowest / 2 ** (bits * plain(place)) if lowest > 256 else lowest)


def codes_a_byte(kind: Any, _semantic: Any = None) -> tl.constexpr:
    """Of rows that are read as words."""
    return tl.constexpr({INT4.value: 2, INT2.value: 4}.get(plain(kind), 1))


def exponent(unit: Any, _semantic: Any = None) -> tl.constexpr:
    """Of a power of two."""
    return tl.constexpr(int(math.log2(plain(unit))))


def enlargement(kind: Any, compute: Any, _semantic: Any = None) -> tl.constexpr:
    """What is added to the exponents of probabilities that V's codes are multiplied by."""
    return tl.constexpr(_ENLARGEMENT[plain(kind)] if plain(compute) == tl.float16 else 0.0)


def plain(x: Any) -> Any:
    """A constant of device code as the compilation's host has it."""
    return x.value if isinstance(x, tl.constexpr) else x


for _function in (
    converts_e4m3,
    low_unit,
    unit,
    codes_a_byte,
    exponent,
    enlargement,
):  # device code calls them with the compilation
    _function.__triton_builtin__ = True


@triton.jit
def _bytes_apart(words, KIND: tl.constexpr, COMPUTE: tl.constexpr):
    """Even and odd bytes of words int16 as numbers, by shifts and exact conversions."""
    wide = words.to(tl.int32)
    even, odd = (wide & 255).to(tl.uint8), ((wide >> 8) & 255).to(tl.uint8)
    if KIND == FP8:
        parts = (fp8_codes(even, tl.float32).to(COMPUTE), fp8_codes(odd, tl.float32).to(COMPUTE))
    elif KIND == INT8:
        even, odd = even.to(tl.int8, bitcast=True), odd.to(tl.int8, bitcast=True)
        parts = (even.to(tl.float32).to(COMPUTE), odd.to(tl.float32).to(COMPUTE))
    elif KIND == INT2:
        parts = (
            (even & 3).to(tl.float32).to(COMPUTE), ((even >> 2) & 3).to(tl.float32).to(COMPUTE),
            ((even >> 4) & 3).to(tl.float32).to(COMPUTE), (even >> 6).to(tl.float32).to(COMPUTE),
            (odd & 3).to(tl.float32).to(COMPUTE), ((odd >> 2) & 3).to(tl.float32).to(COMPUTE),
            ((odd >> 4) & 3).to(tl.float32).to(COMPUTE), (odd >> 6).to(tl.float32).to(COMPUTE),
        )  # fmt: skip
    else:
        parts = (
            (even & 15).to(tl.float32).to(COMPUTE), (even >> 4).to(tl.float32).to(COMPUTE),
            (odd & 15).to(tl.float32).to(COMPUTE), (odd >> 4).to(tl.float32).to(COMPUTE),
        )  # fmt: skip
    return parts


@triton.jit
def word_parts(words, KIND: tl.constexpr, COMPUTE: tl.constexpr):
    """Words int16 of FP8, INT8, INT4 or INT2 codes -> COMPUTE numbers times `unit`, of each word: its even
    and its odd byte; of INT4 and INT2 the even byte's codes, the lowest first, then the odd one's.
    """
    if COMPUTE == tl.float32 or not takes_ptx():
        parts = _bytes_apart(words, KIND, COMPUTE)
    elif KIND == INT8:
        parts = tl.inline_asm_elementwise(
            _INT8, "=&r,=&r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    elif KIND == FP8:
        parts = tl.inline_asm_elementwise(
            _E4M3 if converts_e4m3() else _E4M3_BY_BITS,
            "=&r,=&r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif KIND == INT2:
        parts = tl.inline_asm_elementwise(
            _INT2, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r", [words],
            dtype=(
                tl.float16, tl.float16, tl.float16, tl.float16,
                tl.float16, tl.float16, tl.float16, tl.float16,
            ), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        parts = tl.inline_asm_elementwise(
            _INT4, "=&r,=&r,=&r,=&r,r", [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return parts


@triton.jit
def fp8_numbers(codes, COMPUTE: tl.constexpr):
    """E4M3 bytes uint8 -> COMPUTE numbers times `low_unit`, in their order."""
    if COMPUTE == tl.float16 and converts_e4m3():
        values = tl.inline_asm_elementwise(
            _E4M3_IN_ORDER, "=&r,=&r,r", [codes], dtype=tl.float16, is_pure=False, pack=4
        )
    else:
        values = fp8_codes(codes, COMPUTE)
    return values


@triton.jit
def settled(x):
    """x in 16 bits, computed once: the compiler looks for what it can move no further back than here."""
    if takes_ptx() and x.dtype.primitive_bitwidth == 16:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x
