"""Packed bytes to 16-bit floats: what the assembly's bit operations give for every byte."""

import re

import pytest
import torch
import triton.language as tl

from kvq.kernels.codec import e4m3
from kvq.kernels.gpu import rows

INSTRUCTION = re.compile(
    r"(and|or|xor|shr|shl|prmt|fma|mov)\.(?:rn\.)?([bu]32|b?f16x2) (\S+), (\S+?)(?:, (\S+?))?(?:, (\S+))?;"
)


def run(program: str, value: int, outputs: int) -> list[int]:
    """Carry out the few PTX instructions that the kernels use; $0... are outputs, the last the input."""
    registers = {f"${outputs}": value}

    def read(name: str) -> int:
        return int(name, 16) if name.startswith("0x") else int(name) if name.isdigit() else registers[name]

    def lanes(name: str) -> torch.Tensor:
        bits = [read(name) >> shift & 0xFFFF for shift in (0, 16)]
        return torch.tensor(bits, dtype=torch.int32).to(torch.int16)

    for line in program.replace("{{", "{").replace("}}", "}").splitlines():
        found = INSTRUCTION.fullmatch(line.strip())
        if not found:
            assert line.strip() in ("", "{", "}") or line.startswith(".reg"), line
            continue
        name, kind, into, *arguments = found.groups()
        if name == "mov":
            registers[into] = read(arguments[0])
            continue
        a, b = read(arguments[0]), read(arguments[1])
        if name == "fma":
            dtype = torch.bfloat16 if kind == "bf16x2" else torch.float16
            x, y, z = (lanes(argument).view(dtype).double() for argument in arguments)
            low, high = (x * y + z).to(dtype).view(torch.int16).int().tolist()
            registers[into] = (low & 0xFFFF) | (high & 0xFFFF) << 16
            continue
        if name == "prmt":  # PTX ISA, prmt: byte i of the result is the byte of {b, a} that nibble i names
            pool = [a >> 8 * i & 0xFF for i in range(4)] + [b >> 8 * i & 0xFF for i in range(4)]
            selector = read(arguments[2])
            registers[into] = sum(pool[selector >> 4 * i & 7] << 8 * i for i in range(4))
        else:
            shifted = {"shr": a >> (b & 31), "shl": (a << (b & 31)) & 0xFFFFFFFF}
            registers[into] = {"and": a & b, "or": a | b, "xor": a ^ b, **shifted}[name]
    return [registers[f"${i}"] for i in range(outputs)]


def halves(words: list[int], dtype: torch.dtype) -> list[float]:
    """The 16-bit floats in 32-bit registers, low halves first."""
    bits = [word >> shift & 0xFFFF for word in words for shift in (0, 16)]
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(dtype).float().tolist()


@pytest.mark.parametrize(
    ("program", "dtype", "compute"),
    [
        (rows.NIBBLES_BF16, torch.bfloat16, tl.bfloat16),
        (rows.NIBBLES_FP16, torch.float16, tl.float16),
    ],
    ids=["bf16", "fp16"],
)
def test_nibbles_become_their_codes_in_the_order_of_the_bytes(
    program: tl.constexpr, dtype: torch.dtype, compute: tl.dtype
) -> None:
    for byte in range(256):
        packed = [byte, byte ^ 0xFF, (byte * 7) & 0xFF, (byte + 13) & 0xFF]
        word = sum(x << 8 * i for i, x in enumerate(packed))
        registers = run(program.value, word, 4)
        assert halves(registers[:2], dtype) == [
            (x & 15) / rows.unit(rows.INT4.value, compute) for x in packed
        ]
        assert halves(registers[2:], dtype) == [
            (x >> 4) / rows.unit(rows.INT4.value, compute) for x in packed
        ]


def test_fp8_bytes_become_their_values_over_256() -> None:
    finite = [x for x in range(256) if x & 0x7F != 0x7F]
    for byte in finite:
        packed = [byte, byte ^ 0x80, finite[(byte * 5) % len(finite)], finite[(byte + 99) % len(finite)]]
        word = sum(x << 8 * i for i, x in enumerate(packed))
        want = e4m3.decode(torch.tensor(packed, dtype=torch.uint8)) / 256
        assert halves(run(rows.FP8_FP16.value, word, 2), torch.float16) == want.tolist()


@pytest.mark.parametrize(
    ("program", "dtype", "compute"),
    [
        (rows.INT8_BF16, torch.bfloat16, tl.bfloat16),
        (rows.INT8_FP16_DIVIDED, torch.float16, tl.float16),
    ],
    ids=["bf16", "fp16"],
)
def test_int8_bytes_become_their_values(program: tl.constexpr, dtype: torch.dtype, compute: tl.dtype) -> None:
    for code in range(-128, 128):
        packed = [code, -code - 1, (code * 7 + 64) % 128, code // 2]
        word = sum((x & 0xFF) << 8 * i for i, x in enumerate(packed))
        want = [x / rows.unit(rows.INT8.value, compute) for x in packed]
        assert halves(run(program.value, word, 2), dtype) == want
