"""Device code that decodes a tile of packed weights to numbers for a matrix product.

The host packs weights so that the 16 bytes loaded by a thread are the codes that tensor cores read from that
thread (see triton_pack.py): no layout conversion is needed between memory and product.

Only NVIDIA GPUs run the inline assembly; elsewhere, shifts and masks compute the same values.
"""

import triton
import triton.language as tl

from kvq.kernels.gpu.rows import fp8_codes, int8_codes, nibbles, takes_ptx
from kvq.kernels.linear.triton_pack import Kind

SIGNED_NIBBLES = tl.constexpr(Kind.SIGNED_NIBBLES.value)
INT8 = tl.constexpr(Kind.INT8.value)
FP8 = tl.constexpr(Kind.FP8.value)
ROWS = tl.constexpr(Kind.ROWS.value)
Q4_K = tl.constexpr(Kind.Q4_K.value)
Q6_K = tl.constexpr(Kind.Q6_K.value)

# Four bytes of two codes in two's complement become INT8 numbers, each 16 times its code.
_NIBBLES_INT8 = tl.constexpr("""
{
.reg .b32 low;
shl.b32 low, $2, 4;
and.b32 $0, low, 0xf0f0f0f0;
and.b32 $1, $2, 0xf0f0f0f0;
}
""")

# Nibbles of two codes ($2) and two more bits of each ($3) become INT8 numbers, each 4 times its code.
_SIX_BITS = tl.constexpr("""
{
.reg .b32 low, high;
shl.b32 low, $3, 6;
shl.b32 high, $3, 4;
shl.b32 $0, $2, 2;
shr.b32 $1, $2, 2;
and.b32 $0, $0, 0x3c3c3c3c;
and.b32 $1, $1, 0x3c3c3c3c;
lop3.b32 $0, low, 0xc0c0c0c0, $0, 0xea;
lop3.b32 $1, high, 0xc0c0c0c0, $1, 0xea;
}
""")


@triton.jit
def six_bit_integers(packed, more, ROWS: tl.constexpr):
    """Return two tensors of codes of 6 bits times 4, int8 [ROWS, 64]; see `pack_blocks`.

    `packed`: uint8 [ROWS, 64], nibbles; `more`: uint8 [ROWS, 32], the upper bits of both codes of two bytes.
    """
    upper = tl.permute(tl.reshape(tl.join(more, more >> 4), (ROWS, 4, 2, 4, 2)), (0, 1, 2, 4, 3))
    upper = tl.reshape(upper, (ROWS, 64))  # of a thread: [half, byte of two, 4 bytes]
    if not takes_ptx():
        low = ((packed & 15) << 2 | upper << 6).to(tl.int8, bitcast=True)
        high = ((packed >> 4) << 2 | upper >> 2 << 6).to(tl.int8, bitcast=True)
    else:
        low, high = tl.inline_asm_elementwise(
            _SIX_BITS, "=&r,=&r,r,r", [packed, upper], dtype=(tl.int8, tl.int8), is_pure=False, pack=4
        )
    return low, high


@triton.jit
def half_scales(scale, fine, PART: tl.constexpr, KIND: tl.constexpr):
    """Return the scale of half a block of Q4_K or Q6_K, and what is subtracted from its products, fp32 [BN].

    `scale`, `fine`: the words of all 256 values and of the block; see `pack_blocks`. Codes of Q4_K are less
    8, which the minimum makes up for.
    """
    if KIND == Q4_K:
        whole = scale.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        minimum = (scale >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        own = whole * (fine >> 16 * PART & 255).to(tl.float32)
        minimum = minimum * (fine >> 16 * PART + 8 & 255).to(tl.float32) - 8.0 * own
    else:
        own = scale.to(tl.float32) * (fine.to(tl.int32) << 24 - 8 * PART >> 24).to(tl.float32)
        minimum = own
    return own, minimum


@triton.jit
def nibble_integers(packed):
    """Return the low and high codes times 16, int8; each byte of `packed` has two in two's complement."""
    if not takes_ptx():
        low = (packed << 4).to(tl.int8, bitcast=True)
        high = (packed & 0xF0).to(tl.int8, bitcast=True)
    else:
        low, high = tl.inline_asm_elementwise(
            _NIBBLES_INT8, "=&r,=r,r", [packed], dtype=(tl.int8, tl.int8), is_pure=False, pack=4
        )
    return low, high


@triton.jit
def columns(first, BN: tl.constexpr, RUNS: tl.constexpr, WARPS: tl.constexpr):
    """Return the output index of each column of a tile, [BN]; the tile starts at output `first`.

    A thread's 16 bytes have RUNS parts, for outputs that are 8 apart; between them lie other warps' columns.
    """
    column = tl.arange(0, BN)
    if RUNS > 1:
        rest = column // (8 * WARPS)  # [repeat, run]
        eight = (rest // RUNS * WARPS + column // 8 % WARPS) * RUNS + rest % RUNS
        column = eight * 8 + column % 8
    return first + column


@triton.jit
def _operand(
    codes, COMPUTE: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr, RUNS: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Return codes [BN / RUNS, 64] as a second factor [WIDTH, BN], without moves between threads."""
    REPEATS: tl.constexpr = BN // (8 * RUNS * WARPS)
    if COMPUTE == tl.int8:  # bits of a place: [repeat, warp, 8 outputs, thread of 4, run, word, byte]
        bits = tl.reshape(codes, (REPEATS, WARPS, 8, 4, RUNS, 4 // RUNS, 4))
        bits = tl.permute(bits, (5, 3, 6, 0, 4, 1, 2))
    else:
        bits = tl.reshape(codes, (REPEATS, WARPS, 8, 4, RUNS, 4 // RUNS, 2, 2))
        bits = tl.permute(bits, (5, 6, 3, 7, 0, 4, 1, 2))
    return tl.reshape(bits, (WIDTH, BN))


@triton.jit
def weight_tile(
    w_ptr, block, tile, w_rows,
    KIND: tl.constexpr, COMPUTE: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr,
    RUNS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Return two tensors of codes [WIDTH, BN] for a block of inputs and a tile of outputs; see `columns`.

    With nibbles and 6 bits, the first tensor has the codes of the block's first half, and the second those of
    the other half; with bytes, both are the same.
    """
    if KIND == ROWS:  # [outputs, blocks * WIDTH], one byte per code
        row = (tile * BN + tl.arange(0, BN)).to(tl.int64)
        at = row[:, None] * w_rows + (tl.cast(block, tl.int64) * WIDTH + tl.arange(0, WIDTH))[None, :]
        first = tl.trans(tl.load(w_ptr + at))
        second = first
    else:  # [blocks, outputs / RUNS, 64 bytes, or 96 of Q6_K]
        BYTES: tl.constexpr = 96 if KIND == Q6_K else 64
        start = (tl.cast(block, tl.int64) * w_rows + tile * (BN // RUNS)) * BYTES
        row = tl.arange(0, BN // RUNS)[:, None] * BYTES
        packed = tl.load(w_ptr + start + (row + tl.arange(0, 64)[None, :]))
        if KIND == Q6_K:
            more = tl.load(w_ptr + start + (row + (64 + tl.arange(0, 32))[None, :]))
            low, high = six_bit_integers(packed, more, BN // RUNS)
            low, high = int8_codes(low, COMPUTE), int8_codes(high, COMPUTE)
        elif KIND == SIGNED_NIBBLES:
            low, high = nibble_integers(packed)
        elif KIND == INT8:
            low = int8_codes(packed, COMPUTE)
            high = low
        elif KIND == FP8:
            low = fp8_codes(packed, COMPUTE)
            high = low
        else:
            low, high = nibbles(packed, COMPUTE)
        first = _operand(low, COMPUTE, WIDTH, BN, RUNS, WARPS)
        second = _operand(high, COMPUTE, WIDTH, BN, RUNS, WARPS)
    return first, second
