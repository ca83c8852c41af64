"""Packed bytes to 16-bit floats: what the assembly's bit operations give for every byte."""

import itertools
import re

import pytest
import torch

from kvq.kernels.attend.triton import scales as attend_scales
from kvq.kernels.codec import e4m3, narrow
from kvq.kernels.gpu import words

INSTRUCTION = re.compile(
    r"(and|or|xor|sh[rl]|prmt|fma|mul|mad\.lo|add|mov)\.(?:rn\.)?([bu]32|b?f16x2) "
    r"(\S+), (\S+?)(?:, (\S+?))?(?:, (\S+))?;"
)


def run(program: str, value: int | list[int], outputs: int) -> list[int]:
    """Carry out the few PTX instructions that the kernels use; $0... are outputs, the last the inputs."""
    values = value if isinstance(value, list) else [value]
    registers = {f"${outputs + i}": x for i, x in enumerate(values)}

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
        if name == "mad.lo":
            registers[into] = (a * b + read(arguments[2])) & 0xFFFFFFFF
            continue
        if name in ("fma", "add", "mul"):
            dtype = torch.bfloat16 if kind == "bf16x2" else torch.float16
            x, *factors, z = (lanes(argument).view(dtype).double() for argument in arguments if argument)
            y = x * factors[0] + z if factors else x * z if name == "mul" else x + z
            low, high = y.to(dtype).view(torch.int16).int().tolist()
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


def joined(packed: list[int]) -> int:
    """Bytes as a register, the first lowest."""
    return sum((x & 0xFF) << 8 * i for i, x in enumerate(packed))


def halves(words: list[int], dtype: torch.dtype) -> list[float]:
    """The 16-bit floats in 32-bit registers, low halves first."""
    bits = [word >> shift & 0xFFFF for word in words for shift in (0, 16)]
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(dtype).float().tolist()


def test_words_of_int8_become_the_values_of_their_even_and_odd_bytes() -> None:
    for code in range(-128, 128):
        packed = [code, -code - 1, (code * 7 + 64) % 128, code // 2]
        even, odd = (halves([x], torch.float16) for x in run(words._INT8.value, joined(packed), 2))
        assert (even, odd) == (packed[::2], packed[1::2])


def test_words_of_fp8_become_the_values_of_their_bytes_over_256_where_no_instruction_converts() -> None:
    finite = [x for x in range(256) if x & 0x7F != 0x7F]
    for byte in finite:
        packed = [byte, byte ^ 0x80, finite[(byte * 5) % len(finite)], finite[(byte + 99) % len(finite)]]
        want = (e4m3.decode(torch.tensor(packed, dtype=torch.uint8)) / 256).tolist()
        even, odd = (halves([x], torch.float16) for x in run(words._E4M3_BY_BITS.value, joined(packed), 2))
        assert (even, odd) == (want[::2], want[1::2])


def test_the_instruction_that_converts_fp8_takes_even_bytes_then_odd_ones() -> None:
    """All but the conversion itself."""
    sorting = next(line for line in words._E4M3.value.splitlines() if line.startswith("prmt"))
    (found,) = run(sorting.replace("$2", "$1").replace("sorted", "$0"), joined([1, 2, 3, 4]), 1)
    assert found == joined([1, 3, 2, 4])


@pytest.mark.parametrize("kind", words._PLANES, ids=str)
def test_words_of_packed_codes_become_subnormal_numbers(kind: int) -> None:
    """With the bits of a second plane at every place, and of every number of tiles that it may come in."""
    low, high = words._PLANES[kind]
    places = range(0, low, high) if high else [0]
    for place, pieces, piece in itertools.product(places, (1, 2, 4), range(4)):
        if piece >= pieces or (high == 0 and pieces > 1) or place + high * pieces > low:
            continue
        program = words.parts_assembly(kind, place, pieces if high else 0).value
        for byte in range(256):
            packed = [byte, byte ^ 0xFF, (byte * 7) & 0xFF, (byte + 13) & 0xFF]
            more = [(byte * 11 + 5) & 0xFF, byte ^ 0x5A, (byte * 3) & 0xFF, byte]
            tiles = [joined(more) if i == piece else 0 for i in range(pieces)] if high else []
            count = 16 // low
            parts = [halves([x], torch.float16) for x in run(program, [joined(packed), *tiles], count)]
            for i, part in enumerate(parts):
                at = low * (i % (8 // low))
                codes = [x >> at & (1 << low) - 1 for x in packed[i // (8 // low) :: 2]]
                bits = [x >> place + high * piece + at for x in more[i // (8 // low) :: 2]]
                codes = [x | (y & (1 << high) - 1) << low for x, y in zip(codes, bits, strict=True)]
                assert part == [x * 2.0 ** (at - 24) for x in codes]


def test_words_of_narrow_scales_become_32_times_the_scales_and_the_minimums() -> None:
    """Also as fp32 times a power of two; all of them exact."""
    for scale in range(8, 248):
        packed = [scale, (scale * 37) & 0xFF, 255 - scale, (scale * 11 + 128) & 0xFF]
        want = narrow.decode(torch.tensor(packed, dtype=torch.uint8).view(2, 2), 4)
        word, other = joined(packed), joined(packed[2:] + packed[:2])
        for bits in range(2, 7):
            (minimums,) = run(attend_scales.minimums_assembly(bits).value, word, 1)
            assert halves([minimums], torch.float16) == (want[:, 1] * 2.0 ** (bits - 4)).half().tolist()
        for place, program in enumerate((attend_scales._LOW_SCALES, attend_scales._HIGH_SCALES)):
            (scales,) = run(program.value, [word, other], 1)
            both = [want[place, 0], want[1 - place, 0]]
            assert halves([scales], torch.float16) == [32 * float(x) for x in both]
            (bits,) = run(attend_scales.wide_assembly(place, 24).value, word, 1)
            assert torch.tensor(bits, dtype=torch.int32).view(torch.float32) == want[place, 0] * 2.0**24
