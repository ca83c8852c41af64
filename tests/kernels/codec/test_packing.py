"""Packing of every width, half-split, quarter-split, and in planes."""

import pytest
import torch

from kvq.formats import Code, Kind
from kvq.kernels.codec.packing import pack, unpack

HEAD_DIMS = [48, 60, 64, 80, 96, 128, 192, 256]


def code_of(bits: int) -> Code:
    return Code(name=f"any{bits}", bits=bits, kind=Kind.GROUPED, group=32)


def codes_of(bits: int, dim: int) -> torch.Tensor:
    """Random codes, uint8 [3, 7, dim]."""
    seed = torch.Generator().manual_seed(dim)
    return torch.randint(0, 1 << bits, (3, 7, dim), generator=seed).to(torch.uint8)


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_byte_i_holds_element_i_low_and_element_i_plus_half_high(dim: int) -> None:
    codes = codes_of(4, dim)
    packed = pack(codes, Code.INT4)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, 7, dim // 2)
    for i in range(dim // 2):
        assert torch.equal(packed[..., i] & 15, codes[..., i])
        assert torch.equal(packed[..., i] >> 4, codes[..., i + dim // 2])


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_byte_i_holds_four_elements_a_quarter_apart_from_low_to_high(dim: int) -> None:
    codes = codes_of(2, dim)
    packed = pack(codes, Code.INT2)
    assert packed.shape == (3, 7, dim // 4)
    for i in range(dim // 4):
        for part in range(4):
            assert torch.equal((packed[..., i] >> (2 * part)) & 3, codes[..., i + part * dim // 4])


@pytest.mark.parametrize("dim", [48, 64, 80])
def test_six_bits_are_a_plane_of_four_and_one_of_two(dim: int) -> None:
    codes = codes_of(6, dim)
    packed = pack(codes, code_of(6))
    assert torch.equal(packed[..., : dim // 2], pack(codes & 15, Code.INT4))
    assert torch.equal(packed[..., dim // 2 :], pack(codes >> 4, Code.INT2))


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("dim", [48, 64, 80, 96, 128, 192, 256])
def test_unpack_undoes_pack_and_pack_undoes_unpack(bits: int, dim: int) -> None:
    codes, code = codes_of(bits, dim), code_of(bits)
    packed = pack(codes, code)
    assert packed.shape == (3, 7, dim * bits // 8)
    assert torch.equal(unpack(packed, code), codes)
    every_byte = torch.arange(256 * bits).to(torch.uint8).reshape(16, 16 * bits)
    assert torch.equal(pack(unpack(every_byte, code), code), every_byte)


@pytest.mark.parametrize("bits", range(2, 9))
def test_packing_leaves_its_input_alone(bits: int) -> None:
    codes = codes_of(bits, 48)
    before = codes.clone()
    pack(codes, code_of(bits))
    assert torch.equal(codes, before)
