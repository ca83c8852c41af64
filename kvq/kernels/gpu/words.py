"""Device functions for codes that are read two bytes at a time, as 16-bit words.

Tensor cores multiply 16-bit numbers, and `ldmatrix` loads 16-bit elements from shared memory directly into
the registers that a product reads. Packed bytes are therefore loaded as words and decoded in registers: a
word's even byte and odd byte become operands of two products, which are summed or form alternate columns of
the output. The assembly is pure, so the compiler may move it next to the product.

Packed codes are stored in planes (see codec/packing.py). Words are read from the first plane; codes of 3, 5
and 6 bits have their high bits in words of a second plane, at a place that all words of a run share.
"""

import math
from typing import Any

import triton
import triton.language as tl

from kvq.kernels.gpu.rows import (
    CHANNEL,
    FP8,
    INT2,
    INT3,
    INT4,
    INT5,
    INT6,
    INT8,
    SPREAD_E4M3,
    SPREAD_INT8,
    fp8_codes,
    takes_ptx,
)

# Powers of two by which fp16 probabilities are enlarged before they are multiplied by V's scales: scales are
# small numbers, but the largest scales of fp16 rows must not cause an overflow.
_ENLARGEMENT = {
    **{INT2.value: 1.0, INT3.value: 2.0, INT4.value: 4.0, INT5.value: 5.0, INT6.value: 6.0},
    **{INT8.value: 7.0, FP8.value: 8.0},
}
# Of packed codes: bits in the first plane, and in the second one.
_PLANES = {
    **{INT2.value: (2, 0), INT3.value: (2, 1), INT4.value: (4, 0), INT5.value: (4, 1), INT6.value: (4, 2)},
    CHANNEL.value: (8, 0),  # pairs of 4 bits each
}
_LEAST_WITH_E4M3 = 89  # the first capability that converts FP8 by an instruction

# Inputs are two adjacent words, of bytes 0 to 3; outputs are fp16 numbers of both words.
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


def converts_e4m3(_semantic: Any = None) -> tl.constexpr:
    """Return True if the GPU for which code is being compiled has an instruction that converts FP8."""
    if not takes_ptx(_semantic=_semantic).value:
        return tl.constexpr(False)
    return tl.constexpr(int(_semantic.builder.options.arch.removeprefix("sm")) >= _LEAST_WITH_E4M3)


def low_unit(kind: Any, compute: Any, _semantic: Any = None) -> tl.constexpr:
    """Return the factor that converts the numbers returned by `word_parts` to the values of the codes."""
    by_bits = plain(compute) == tl.float16 and takes_ptx(_semantic=_semantic).value
    if plain(kind) == FP8.value:
        return tl.constexpr(1.0 if by_bits and converts_e4m3(_semantic=_semantic).value else 256.0)
    return tl.constexpr(2.0**24 if by_bits and plain(kind) in _PLANES else 1.0)


def unit(kind: Any, compute: Any, place: Any, _semantic: Any = None) -> tl.constexpr:  # D117
    """Return `low_unit` adjusted to codes at a given place in their bytes; place 0 has the lowest bits."""
    lowest = low_unit(kind, compute, _semantic=_semantic).value
    bits = 8 // codes_a_byte(kind).value
    return tl.constexpr(lowest / 2 ** (bits * plain(place)) if lowest > 256 else lowest)


def codes_a_byte(kind: Any, _semantic: Any = None) -> tl.constexpr:
    """Return the number of codes per byte in the first plane of rows that are read as words."""
    return tl.constexpr(8 // _PLANES[plain(kind)][0] if plain(kind) in _PLANES else 1)


def code_bits(kind: Any, _semantic: Any = None) -> tl.constexpr:
    """Return the number of bits of a packed code."""
    return tl.constexpr(sum(_PLANES[plain(kind)]))


def high_bits(kind: Any, _semantic: Any = None) -> tl.constexpr:  # D125: two planes joined in registers
    """Return the number of bits of a packed code that are in the second plane."""
    return tl.constexpr(_PLANES[plain(kind)][1])


def high_bytes(kind: Any, dim: Any, _semantic: Any = None) -> tl.constexpr:
    """Return the number of bytes in a row's second plane.

    Each of these bytes holds the high bits of several first-plane bytes, one at each of its places.
    """
    return tl.constexpr(plain(dim) * high_bits(kind).value // 8)


def high_start(kind: Any, start: Any, dim: Any, _semantic: Any = None) -> tl.constexpr:
    """Return the offset in a row of the bytes with the high bits of byte `start` of the first plane."""
    return tl.constexpr(plain(dim) // codes_a_byte(kind).value + plain(start) % high_bytes(kind, dim).value)


def high_place(kind: Any, start: Any, dim: Any, _semantic: Any = None) -> tl.constexpr:
    """Return the place of the high bits of the lowest code in byte `start`; 0 without a second plane."""
    high = high_bits(kind).value
    return tl.constexpr(high * (plain(start) // high_bytes(kind, dim).value) if high else 0)


def parts_assembly(kind: Any, place: Any, pieces: Any, _semantic: Any = None) -> tl.constexpr:
    """Return assembly that converts two adjacent words of packed codes and their high bits to fp16, place by
    place.

    A code at the low end of the fp16 mantissa is the subnormal number code * 2^-24; a code in a higher
    position is multiplied by a power of two; all ten bits represent at most 1,023. Tensor cores multiply
    subnormal fp16 numbers exactly (Fasi et al., "Numerical behavior of NVIDIA tensor cores", 2021, section
    4). `place`, `pieces`: as for `word_parts`.
    """
    low, high = _PLANES[plain(kind)]
    places = 8 // low
    words, first = f"${2 * places}", 2 * places + 1
    lines = [".reg .b32 odd;", f"shr.u32 odd, {words}, 8;"]
    if high:
        at = plain(place)
        lines += [".reg .b32 bits, up, down, more;", f"mov.b32 bits, ${first};"]
        for piece in range(1, plain(pieces)):
            lines += [f"shr.u32 more, ${first + piece}, {high * piece};", "or.b32 bits, bits, more;"]
        lines += [f"shl.b32 up, bits, {low - at};", f"shr.u32 down, bits, {8 - low + at};"]
    for byte, (own, bits) in enumerate(((words, "up"), ("odd", "down"))):
        for i in range(places):
            part = f"${byte * places + i}"
            lines.append(f"and.b32 {part}, {own}, {_in_both((1 << low) - 1 << low * i)};")
            if high:
                lines += [
                    f"and.b32 more, {bits}, {_in_both((1 << high) - 1 << low * (i + 1))};",
                    f"or.b32 {part}, {part}, more;",
                ]
    return tl.constexpr("\n".join(("{", *lines, "}")))


def parts_constraints(kind: Any, pieces: Any, _semantic: Any = None) -> tl.constexpr:
    """Return the register constraints of `parts_assembly`."""
    return tl.constexpr("=&r," * (2 * codes_a_byte(kind).value) + ",".join(["r"] * (1 + plain(pieces))))


def _in_both(half: int) -> str:
    """Return a 16-bit mask repeated in both halves of a register."""
    return f"0x{half:04x}{half:04x}"


def exponent(unit: Any, _semantic: Any = None) -> tl.constexpr:
    """Return the exponent of a power of two."""
    return tl.constexpr(int(math.log2(plain(unit))))


def enlargement(kind: Any, compute: Any, _semantic: Any = None) -> tl.constexpr:  # D120
    """Return the number to add to the exponents of probabilities that multiply V's codes."""
    return tl.constexpr(_ENLARGEMENT[plain(kind)] if plain(compute) == tl.float16 else 0.0)


def plain(x: Any) -> Any:
    """Return the plain value of a constant of device code."""
    return x.value if isinstance(x, tl.constexpr) else x


for _function in (
    converts_e4m3,
    low_unit,
    unit,
    codes_a_byte,
    code_bits,
    high_bits,
    high_bytes,
    high_start,
    high_place,
    parts_assembly,
    parts_constraints,
    exponent,
    enlargement,
):  # device code calls them with the compilation
    _function.__triton_builtin__ = True


@triton.jit
def _bytes_apart(words, KIND: tl.constexpr, COMPUTE: tl.constexpr):
    """Convert even and odd bytes of FP8 or INT8 words, int16, by shifts and exact conversions."""
    wide = words.to(tl.int32)
    even, odd = (wide & 255).to(tl.uint8), ((wide >> 8) & 255).to(tl.uint8)
    if KIND == FP8:
        parts = (fp8_codes(even, tl.float32).to(COMPUTE), fp8_codes(odd, tl.float32).to(COMPUTE))
    else:
        even, odd = even.to(tl.int8, bitcast=True), odd.to(tl.int8, bitcast=True)
        parts = (even.to(tl.float32).to(COMPUTE), odd.to(tl.float32).to(COMPUTE))
    return parts


@triton.jit
def _codes_apart(words, high, KIND: tl.constexpr, COMPUTE: tl.constexpr, PLACE: tl.constexpr):
    """Convert the packed codes in words to numbers with shifts and exact conversions; see `word_parts`."""
    HIGH: tl.constexpr = high_bits(KIND)
    PER: tl.constexpr = codes_a_byte(KIND)
    LOW: tl.constexpr = 8 // PER
    wide = words.to(tl.int32)
    bits = tl.zeros(words.shape, tl.int32)
    for i in tl.static_range(len(high)):
        bits = bits | ((high[i].to(tl.int32) & 0xFFFF) >> HIGH * i)
    parts = ()
    for at in tl.static_range(0, 16, LOW):  # of a word's bits
        code = (wide >> at) & (2**LOW - 1)
        if HIGH > 0:
            code = code | (((bits >> PLACE + at) & (2**HIGH - 1)) << LOW)
        parts = parts + (code.to(tl.float32).to(COMPUTE),)
    return parts


@triton.jit
def word_parts(words, high, KIND: tl.constexpr, COMPUTE: tl.constexpr, PLACE: tl.constexpr):
    """Convert int16 words of FP8, INT8 or packed codes to COMPUTE numbers, which `unit` scales to values: the
    even and odd bytes of each word or, for packed codes, the codes of the even byte, lowest first, then those
    of the odd byte.

    high: tuple of int16 words of the second plane, or empty. The lowest codes' bits begin at PLACE in its
    first word and one place higher in each following word; only one word is nonzero for a word of codes.
    """
    if KIND < INT4:
        if COMPUTE == tl.float32 or not takes_ptx():
            parts = _bytes_apart(words, KIND, COMPUTE)
        elif KIND == INT8:
            parts = tl.inline_asm_elementwise(
                _INT8, "=&r,=&r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
            )
        else:
            parts = tl.inline_asm_elementwise(
                _E4M3 if converts_e4m3() else _E4M3_BY_BITS,
                "=&r,=&r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
    elif COMPUTE == tl.float32 or not takes_ptx():
        parts = _codes_apart(words, high, KIND, COMPUTE, PLACE)
    else:
        parts = tl.inline_asm_elementwise(
            parts_assembly(KIND, PLACE, len(high)), parts_constraints(KIND, len(high)), (words,) + high,
            dtype=(tl.float16,) * (2 * codes_a_byte(KIND)), is_pure=True, pack=2,
        )  # fmt: skip
    return parts


@triton.jit
def fp8_numbers(codes, COMPUTE: tl.constexpr):
    """Convert E4M3 bytes, uint8, to COMPUTE numbers in order, which `low_unit` scales to values."""
    if COMPUTE == tl.float16 and converts_e4m3():
        values = tl.inline_asm_elementwise(
            _E4M3_IN_ORDER, "=&r,=&r,r", [codes], dtype=tl.float16, is_pure=False, pack=4
        )
    else:
        values = fp8_codes(codes, COMPUTE)
    return values


@triton.jit
def settled(x):
    """Return 16-bit x, computed once: the compiler moves no part of its computation past this point."""
    if takes_ptx() and x.dtype.primitive_bitwidth == 16:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x
