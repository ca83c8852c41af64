"""Packed weights to numbers: what the assembly's bit operations give for every byte."""

import pytest
import torch
import triton.language as tl

from kvq.kernels.codec import e4m3
from kvq.kernels.gpu import rows
from kvq.kernels.linear import triton_codes as codes
from tests.kernels.gpu.test_rows import halves, run


def word(packed: list[int]) -> int:
    return sum((x & 0xFF) << 8 * i for i, x in enumerate(packed))


def signed_bytes(registers: list[int]) -> list[int]:
    found = [register >> shift & 0xFF for register in registers for shift in (0, 8, 16, 24)]
    return [x - 256 if x > 127 else x for x in found]


@pytest.mark.parametrize(
    ("program", "dtype"),
    [(rows.NIBBLES_BF16_LESS_8, torch.bfloat16), (rows.NIBBLES_FP16_LESS_8, torch.float16)],
)
def test_nibbles_become_signed_codes_in_the_order_of_the_bytes(
    program: tl.constexpr, dtype: torch.dtype
) -> None:
    for byte in range(256):
        packed = [byte, byte ^ 0xFF, (byte * 7) & 0xFF, (byte + 13) & 0xFF]
        registers = run(program.value, word(packed), 4)
        assert halves(registers[:2], dtype) == [(x & 15) - 8 for x in packed]
        assert halves(registers[2:], dtype) == [(x >> 4) - 8 for x in packed]


def test_nibbles_become_bytes_of_sixteen_times_the_code() -> None:
    for byte in range(256):
        packed = [byte, byte ^ 0xFF, (byte * 7) & 0xFF, (byte + 13) & 0xFF]
        low, high = (signed_bytes([x]) for x in run(codes._NIBBLES_INT8.value, word(packed), 2))
        assert low == [16 * ((x & 15) - (16 if x & 8 else 0)) for x in packed]
        assert high == [16 * ((x >> 4) - (16 if x & 128 else 0)) for x in packed]


@pytest.mark.parametrize(
    ("program", "dtype"), [(rows.INT8_BF16, torch.bfloat16), (rows.INT8_FP16, torch.float16)]
)
def test_int8_bytes_become_their_values(program: tl.constexpr, dtype: torch.dtype) -> None:
    for code in range(-128, 128):
        packed = [code, -code - 1, (code * 7 + 64) % 128, code // 2]
        assert halves(run(program.value, word(packed), 2), dtype) == packed


@pytest.mark.parametrize(
    ("program", "dtype"), [(rows.FP8_BF16, torch.bfloat16), (rows.FP8_FP16, torch.float16)]
)
def test_fp8_bytes_become_their_values_over_256(program: tl.constexpr, dtype: torch.dtype) -> None:
    finite = [x for x in range(256) if x & 0x7F != 0x7F]
    for byte in finite:
        packed = [byte, byte ^ 0x80, finite[(byte * 5) % len(finite)], finite[(byte + 99) % len(finite)]]
        want = e4m3.decode(torch.tensor(packed, dtype=torch.uint8)) / 256
        assert halves(run(program.value, word(packed), 2), dtype) == want.tolist()
