"""Device functions of the Triton kernels: the rotation, and 16-bit values from packed bytes.

Only NVIDIA GPUs run the inline assembly (PTX). On other GPUs, and in Triton's interpreter, shifts, masks and
exact conversions compute the same bits. Assembly is not marked as pure: otherwise, the compiler would move it
past the layout conversion before a product, and shared memory would be read byte by byte.
"""

import re
from pathlib import Path
from typing import Any

import triton
import triton.language as tl

from kvq.formats import Code, KVFormat

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Layouts of a format's codes in memory, for which the kernels are specialized.
FLOAT, FP8, INT8, INT4, GROUPED, INT2, INT3, INT5, INT6 = (tl.constexpr(kind) for kind in range(9))
CHANNEL, CHANNEL_INT8 = tl.constexpr(9), tl.constexpr(10)  # with scales per channel: grouped codes, and INT8
PACKED = {2: INT2, 3: INT3, 4: INT4, 5: INT5, 6: INT6}  # grouped codes that attention reads as words, by bits
_SOURCE = Path(__file__).with_suffix(".ptx").read_text(encoding="utf-8")
_PTX = {name: f"\n{text}" for name, text in re.findall(r"^// (\w+)\n((?:[^/].*\n)+)", _SOURCE, re.MULTILINE)}

# One 32-bit register of four packed bytes becomes four 16-bit floats from the low nibbles and four from
# the high ones: a nibble under the exponent byte of 128 (bf16) or 1024 (fp16) is 128 or 1024 more than
# the code, which a multiply-add subtracts, together with 8. This is exact: sums of products must not have a
# bias, since tensor cores round when they add.
_SPREAD_NIBBLES = _PTX["spread_nibbles"]
_BF16 = {"magic": "0x43434343", "kind": "bf16x2", "factor": "0x3f803f80"}
_FP16 = {"magic": "0x64646464", "kind": "f16x2"}
NIBBLES_BF16_LESS_8 = tl.constexpr(_SPREAD_NIBBLES.format(**_BF16, minus="0xc308c308"))
NIBBLES_FP16_LESS_8 = tl.constexpr(_SPREAD_NIBBLES.format(**_FP16, factor="0x3c003c00", minus="0xe408e408"))

# Four E4M3FN bytes become four fp16 numbers, each the value divided by 256: sign in place, exponent
# and mantissa one bit further down. `first` and `second` name the bytes of each result, by `prmt`.
SPREAD_E4M3 = _PTX["spread_e4m3"]
FP8_FP16 = tl.constexpr(SPREAD_E4M3.format(first="0x1404", second="0x3424"))
# Or four bf16 numbers: exponent and mantissa at the low end of bf16's, which is the value times 2^-120;
# then multiplied by 2^112.
FP8_BF16 = tl.constexpr(_PTX["fp8_bf16"])

# Four INT8 bytes become four bf16 numbers: 128 + the low seven bits, minus 128 or, with the sign bit, 256.
INT8_BF16 = tl.constexpr(_PTX["int8_bf16"])
# Or four fp16 numbers: 1024 + 128 + x, minus 1152.
SPREAD_INT8 = _PTX["spread_int8"]
INT8_FP16 = tl.constexpr(SPREAD_INT8.format(first="0x4140", second="0x4342"))


def takes_ptx(_semantic: Any = None) -> tl.constexpr:  # D147: the compilation knows, not the GPU at hand
    """Return True if code is being compiled for an NVIDIA GPU; False in the interpreter.

    This depends on the compilation target, not on the device: kernels are also compiled for absent GPUs.
    """
    return tl.constexpr(not INTERPRETED.value and _semantic.builder.options.backend_name == "cuda")


# Device code calls it with the compilation as `_semantic`.
takes_ptx.__triton_builtin__ = True  # type: ignore[attr-defined]


def kind_of(fmt: KVFormat) -> int:
    """Return the layout of a format's codes. Grouped codes of 4 bits have their own layout; other widths are
    unpacked one code at a time, except where attention reads them as words: PACKED."""
    code = fmt.code
    grouped = CHANNEL if fmt.is_per_channel else INT4 if code.bits == 4 else GROUPED
    byte = CHANNEL_INT8 if fmt.is_per_channel else INT8
    kind = grouped if code.is_grouped else {Code.FP8: FP8, Code.INT8: byte}.get(code, FLOAT)
    return int(kind.value)


@triton.jit
def _exactly(x, COMPUTE: tl.constexpr):
    """Convert fp32 to COMPUTE if no rounding is needed; rounding to bf16 takes AMD GPUs five instructions."""
    if COMPUTE == tl.bfloat16:
        values = (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        values = x.to(COMPUTE)
    return values


@triton.jit
def nibbles(packed, COMPUTE: tl.constexpr):  # D119: nibbles become subnormal fp16; 2^24 goes to scales
    """Return the low and high nibbles of packed uint8 bytes, each minus 8, in dtype COMPUTE."""
    if COMPUTE == tl.float32 or not takes_ptx():
        low = _exactly((packed & 15).to(tl.float32) - 8.0, COMPUTE)
        high = _exactly((packed >> 4).to(tl.float32) - 8.0, COMPUTE)
    else:
        low, high = tl.inline_asm_elementwise(
            NIBBLES_BF16_LESS_8 if COMPUTE == tl.bfloat16 else NIBBLES_FP16_LESS_8,
            "=&r,=&r,=&r,=&r,r",
            [packed],
            dtype=(COMPUTE.value, COMPUTE.value),
            is_pure=False,
            pack=4,
        )
    return low, high


@triton.jit
def int8_codes(codes, COMPUTE: tl.constexpr):
    """Convert INT8 codes, or their bytes, to COMPUTE."""
    if COMPUTE == tl.float32 or not takes_ptx():
        values = _exactly(codes.to(tl.int8, bitcast=True).to(tl.float32), COMPUTE)
    else:
        values = tl.inline_asm_elementwise(
            INT8_BF16 if COMPUTE == tl.bfloat16 else INT8_FP16,
            "=&r,=&r,r",
            [codes],
            dtype=COMPUTE.value,
            is_pure=False,
            pack=4,
        )
    return values


@triton.jit
def narrow_scale(code):
    """Return the fp32 scale that a byte represents; `code`: int32. See codec/narrow.py."""
    return ((code << 20) + (107 << 23)).to(tl.float32, bitcast=True)


@triton.jit
def scale_and_minimum(words, BITS: tl.constexpr):
    """Return a group's scale and minimum, fp32, from two fp16 numbers in 32 bits, or two bytes in 16."""
    if words.dtype == tl.int16:
        wide = words.to(tl.int32)
        scale = narrow_scale(wide & 255)
        minimum = (wide >> 8).to(tl.float32) * 2.0 ** (BITS - 7) * scale
    else:
        scale = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        minimum = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, minimum


@triton.jit
def fp8_codes(codes, COMPUTE: tl.constexpr):  # D121: FP8 in fp16 whatever Q is
    """Return the values of E4M3FN bytes, uint8, divided by 256, without FP8 instructions."""
    if COMPUTE == tl.float32 or not takes_ptx():
        wide = codes.to(tl.int8, bitcast=True).to(tl.int16) << 7  # the sign twice, at the top
        half = (wide & -0x4080).to(tl.float16, bitcast=True)
        values = half if COMPUTE == tl.float16 else _exactly(half.to(tl.float32), COMPUTE)
    else:
        values = tl.inline_asm_elementwise(
            FP8_BF16 if COMPUTE == tl.bfloat16 else FP8_FP16,
            "=&r,=&r,r",
            [codes],
            dtype=COMPUTE.value,
            is_pure=False,
            pack=4,
        )
    return values


@triton.jit
def e4m3(x):
    """Round fp32 in [-448, 448] to E4M3; return the values and their bytes. See codec/e4m3.py."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    magnitude = bits.to(tl.float32, bitcast=True)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    small = magnitude < 0.015625
    moved = magnitude + 16384.0
    codes = tl.where(small, moved.to(tl.int32, bitcast=True) - 0x46800000, normal - ((127 - 7) << 3)) | sign
    rounded = tl.where(small, moved - 16384.0, (normal << 20).to(tl.float32, bitcast=True))
    return tl.where(sign != 0, -rounded, rounded), codes


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """Round fp32 to the nearest number in a dtype, as fp32; the interpreter's casts to bf16 truncate."""
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        cut = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
        y = tl.where(x == x, cut.to(tl.float32, bitcast=True), x)
    else:
        y = x.to(DTYPE).to(tl.float32)
    return y


@triton.jit
def _butterfly(x, ROWS: tl.constexpr, DIM: tl.constexpr, H: tl.constexpr):
    pairs = tl.permute(tl.reshape(x, (ROWS, DIM // (2 * H), 2, H)), (0, 1, 3, 2))
    low, high = tl.split(pairs)
    pairs = tl.join(low + high, low - high)
    return tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), (ROWS, DIM))


@triton.jit
def rotate(x, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):  # D128
    """Rotate fp32 [ROWS, DIM] in blocks with the butterflies of codec/hadamard.py; DIM is a power of two."""
    for stage in tl.static_range(12):
        if (1 << stage) < BLOCK:
            x = _butterfly(x, ROWS, DIM, 1 << stage)
    SCALE: tl.constexpr = BLOCK**-0.5
    return x * SCALE


@triton.jit
def _signs(MASK: tl.constexpr):
    """Return a 16 x 16 matrix, with Hadamard blocks of size MASK + 1 on the diagonal: (-1) ** common bits."""
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    both = i & j & MASK
    both = both ^ (both >> 2)
    odd = (both ^ (both >> 1)) & 1
    return tl.where(((i ^ j) & (15 - MASK)) == 0, 1.0 - 2.0 * odd.to(tl.float32), 0.0)


@triton.jit
def rotated(x, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Rotate as `rotate` does, up to fp32 rounding, by products of 16 columns (on GPUs, three in TF32 each).

    After attention products, the compiler would give butterflies a layout with all columns in each thread.
    """
    PRECISION: tl.constexpr = "tf32x3" if takes_ptx() else "ieee"
    LOW: tl.constexpr = min(BLOCK, 16)
    x = tl.dot(tl.reshape(x, (ROWS * DIM // 16, 16)), _signs(LOW - 1), input_precision=PRECISION)
    if BLOCK > 16:
        x = tl.permute(tl.reshape(x, (ROWS, DIM // 16, 16)), (0, 2, 1))
        x = tl.reshape(x, (ROWS * DIM // 16, 16))
        x = tl.dot(x, _signs(BLOCK // 16 - 1), input_precision=PRECISION)
        x = tl.permute(tl.reshape(x, (ROWS, 16, DIM // 16)), (0, 2, 1))
    SCALE: tl.constexpr = BLOCK**-0.5
    return tl.reshape(x, (ROWS, DIM)) * SCALE
