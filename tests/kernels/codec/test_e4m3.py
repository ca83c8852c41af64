"""FP8 E4M3FN by integer arithmetic against torch's own float8 casts."""

import pytest
import torch
from torch import Tensor

from kvq.kernels.codec import e4m3


def torch_bytes(x: Tensor) -> Tensor:
    """The same encoding by torch's cast, saturated first (the cast alone overflows to NaN)."""
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)


def all_bf16() -> Tensor:
    """Every finite bfloat16 value, as fp32."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    return x[torch.isfinite(x)]


def test_every_bf16_value_encodes_to_torchs_byte() -> None:
    x = all_bf16()
    assert len(x) == 2 * 255 * 128  # two signs, 255 finite exponents
    assert torch.equal(e4m3.encode(x), torch_bytes(x))


@pytest.mark.parametrize("spread", [1e-3, 1.0, 100.0, 1e6])
def test_random_fp32_values_encode_to_torchs_bytes(spread: float) -> None:
    x = torch.randn(63, 1021, generator=torch.Generator().manual_seed(3)) * spread
    assert torch.equal(e4m3.encode(x), torch_bytes(x))


def test_random_fp32_bit_patterns_encode_to_torchs_bytes() -> None:
    bits = torch.randint(-(1 << 31), 1 << 31, (200_001,), generator=torch.Generator().manual_seed(5))
    x = bits.to(torch.int32).view(torch.float32)
    x = x[torch.isfinite(x)]
    assert torch.equal(e4m3.encode(x), torch_bytes(x))


def test_ties_go_to_the_even_code_and_their_neighbours_to_the_nearer() -> None:
    positive = e4m3.decode(torch.arange(0x7F, dtype=torch.uint8))  # 0 to 448, subnormals included
    ties = (positive[:-1] + positive[1:]) / 2
    codes = torch.arange(0x7E, dtype=torch.uint8)
    even = codes + (codes & 1)
    assert torch.equal(e4m3.encode(ties), even)
    assert torch.equal(e4m3.encode(torch.nextafter(ties, torch.tensor(0.0))), codes)
    assert torch.equal(e4m3.encode(torch.nextafter(ties, torch.tensor(1e9))), codes + 1)
    for x in (ties, -ties):
        assert torch.equal(e4m3.encode(x), torch_bytes(x))


@pytest.mark.parametrize(
    ("value", "byte"),
    [
        (0.0, 0x00),
        (-0.0, 0x80),
        (2.0**-9, 0x01),
        (2.0**-10, 0x00),
        (-(2.0**-10) * 1.001, 0x81),
        (2.0**-6, 0x08),
        (1.0, 0x38),
        (-448.0, 0xFE),
        (447.9, 0x7E),
        (1e-45, 0x00),
        (-1e-45, 0x80),
    ],
)
def test_known_values_have_their_known_bytes(value: float, byte: int) -> None:
    assert e4m3.encode(torch.tensor([value])).item() == byte


@pytest.mark.parametrize("value", [448.001, 463.9, 464.0, 465.0, 480.0, 65504.0, 1e38, 3.4028234e38])
def test_values_above_448_saturate_and_never_become_nan(value: float) -> None:
    assert e4m3.encode(torch.tensor([value, -value])).tolist() == [0x7E, 0xFE]


def test_all_256_bytes_decode_as_torch_decodes_them() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    ours, torchs = e4m3.decode(codes), codes.view(torch.float8_e4m3fn).float()
    nan = torch.isnan(ours)
    assert nan.nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert torch.equal(nan, torch.isnan(torchs))
    assert torch.equal(ours[~nan].view(torch.int32), torchs[~nan].view(torch.int32))  # -0 apart from 0


def test_every_finite_byte_survives_decode_and_encode() -> None:
    codes = torch.tensor([c for c in range(256) if c not in (0x7F, 0xFF)], dtype=torch.uint8)
    assert torch.equal(e4m3.encode(e4m3.decode(codes)), codes)
