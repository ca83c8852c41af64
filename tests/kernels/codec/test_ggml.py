"""Values of GGUF's blocks: bit for bit those of ggml, in blocks written out here and in random ones."""

import struct

import pytest
import torch

from kvq.formats.ggml import GGML_TYPES
from kvq.kernels.codec.ggml import dequantize

QUANTIZED = [kind.name for kind in GGML_TYPES.values() if not kind.is_float]


def half(value: float) -> bytes:
    return struct.pack("<e", value)


def values(kind: str, block: bytes) -> list[float]:
    raw = torch.frombuffer(bytearray(block), dtype=torch.uint8)[None]
    return dequantize(raw, GGML_TYPES[kind])[0].tolist()


def test_four_bits_in_two_halves():
    codes = bytes(low | (15 - low) << 4 for low in range(16))
    found = values("Q4_0", half(0.5) + codes)
    assert found == [0.5 * (q - 8) for q in range(16)] + [0.5 * (7 - q) for q in range(16)]
    assert values("Q4_1", half(0.5) + half(-3) + codes)[:16] == [0.5 * q - 3 for q in range(16)]
    table = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
    assert values("IQ4_NL", half(2) + codes)[:16] == [2.0 * one for one in table]
    e2m1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert values("MXFP4", bytes([128]) + codes)[:16] == [2 * x for x in e2m1] + [-2 * x for x in e2m1]


def test_a_fifth_bit():
    high = (0xFFFF0000).to_bytes(4, "little")  # set for the second half
    codes = bytes([0x21] * 16)
    assert values("Q5_0", half(1) + high + codes) == [1 - 16.0] * 16 + [2 + 16 - 16.0] * 16
    assert values("Q5_1", half(1) + half(0.5) + high + codes) == [1.5] * 16 + [18.5] * 16


def test_bytes():
    assert values("Q8_0", half(0.25) + bytes(range(250, 256)) + bytes(26))[:7] == [
        -1.5, -1.25, -1, -0.75, -0.5, -0.25, 0,
    ]  # fmt: skip


def test_scales_of_groups():
    scales = bytes([0x41, 2, 3, 4, 0x81, 6, 7, 8, 0x32, 0, 0, 0])  # group 4: 2 and 3, with high bits 1 and 2
    found = values("Q4_K", half(1) + half(0.5) + scales + bytes([0x53] * 128))
    assert found[0] == 1 * 3 - 0.5 * 1
    assert found[32] == 2 * 5 - 0.5 * 6
    assert found[128] == (2 | 1 << 4) * 3 - 0.5 * (3 | 2 << 4)
    five = values("Q5_K", half(1) + half(0.5) + scales + bytes([1] * 32) + bytes([0x53] * 128))
    assert (five[0], five[32]) == (1 * 19 - 0.5, 7.0)
    two = values("Q2_K", bytes([0x21] + [1] * 15) + bytes([0b11100100] * 64) + half(2) + half(0.5))
    assert (two[0], two[16], two[32], two[96]) == (-1.0, 0.0, 2.0, 6.0)
    six = values("Q6_K", bytes([0x21] * 128) + bytes([0b0100] * 64) + bytes([255] + [1] * 15) + half(1))
    assert (six[0], six[16], six[32], six[64]) == (31.0, -31.0, 1 + 16 - 32.0, 2 - 32.0)
    three = values(
        "Q3_K", bytes([1] * 32) + bytes([0b11100100] * 64) + bytes([0x12] * 8 + [0b10] * 4) + half(1)
    )
    assert (three[0], three[32], three[128]) == (0.0, (1 - 4) * 2.0, (0 - 4) * (1 - 32.0))


def test_floats_keep_their_values_at_any_address():
    raw = torch.tensor([0.1, -2.5, 3e4], dtype=torch.float16).view(torch.uint8)
    for shift in range(4):
        moved = torch.cat((torch.zeros(shift, dtype=torch.uint8), raw))[shift:].view(1, -1)
        assert torch.equal(dequantize(moved, GGML_TYPES["F16"]), raw.view(torch.float16)[None])


@pytest.mark.parametrize("kind", QUANTIZED)
def test_random_blocks_have_the_values_of_gguf(kind):
    gguf = pytest.importorskip("gguf")
    own = GGML_TYPES[kind]
    raw = torch.randint(
        0, 256, (7, 3 * own.nbytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    wanted = gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind])
    torch.testing.assert_close(dequantize(raw, own), torch.from_numpy(wanted), rtol=0, atol=0, equal_nan=True)
