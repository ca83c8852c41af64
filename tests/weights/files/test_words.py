"""Bit order: words written out by hand, and rows whose last word isn't full."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvq.weights.files.words import num_words, pack_awq, pack_words, unpack_awq, unpack_words


def words(tensor: Tensor) -> list[int]:
    return [word & 0xFFFFFFFF for word in tensor.flatten().tolist()]


def test_eight_nibbles_lie_in_a_word_from_its_low_end() -> None:
    codes = torch.arange(16, dtype=torch.uint8).view(2, 8)
    assert words(pack_words(codes, 4)) == [0x76543210, 0xFEDCBA98]


def test_four_bytes_lie_in_a_word_from_its_low_end() -> None:
    assert words(pack_words(torch.tensor([[1, 2, 3, 255]], dtype=torch.uint8), 8)) == [0xFF030201]


def test_thirty_two_codes_of_three_bits_lie_in_three_words() -> None:
    """0 to 7 are 0xFAC688 in 24 bits; four times that is 96 bits."""
    codes = torch.arange(8, dtype=torch.uint8).repeat(4)[None]
    assert words(pack_words(codes, 3)) == [0x88FAC688, 0xC688FAC6, 0xFAC688FA]


def test_a_code_of_three_bits_lies_in_two_words() -> None:
    """Code 10 takes bits 30 and 31 of the first word and bit 0 of the second, code 21 bits 63 to 65."""
    codes = torch.zeros(1, 32, dtype=torch.uint8)
    codes[0, 10], codes[0, 21] = 0b111, 0b101
    assert words(pack_words(codes, 3)) == [0xC0000000, 0x80000001, 0b10]


def test_awq_puts_even_columns_before_odd_ones() -> None:
    assert words(pack_awq(torch.arange(8, dtype=torch.uint8)[None])) == [0x75316420]
    assert unpack_awq(torch.tensor([[0x75316420]], dtype=torch.int32)).tolist() == [list(range(8))]


@pytest.mark.parametrize(
    ("count", "bits", "expected"), [(20, 3, 2), (22, 3, 3), (9, 4, 2), (5, 8, 2), (32, 3, 3)]
)
def test_a_row_takes_no_more_words_than_it_needs(count: int, bits: int, expected: int) -> None:
    assert num_words(count, bits) == expected
    assert pack_words(torch.zeros(3, count, dtype=torch.uint8), bits).shape == (3, expected)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 5),
    count=st.integers(1, 100),
    bits=st.sampled_from([3, 4, 8]),
    seed=st.integers(0, 99),
)
def test_words_are_those_of_compressed_tensors(rows: int, count: int, bits: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (rows, count), generator=random).to(torch.uint8)
    q = (codes.int() - 2 ** (bits - 1)).to(torch.int8)
    packed = pack_words(codes, bits)
    assert torch.equal(packed, pack_to_int32(q, bits))
    assert torch.equal(unpack_words(packed, bits, count), codes)
    assert torch.equal(unpack_from_int32(packed, bits, torch.Size((rows, count))), q)


@settings(deadline=None, max_examples=20)
@given(rows=st.integers(1, 5), eights=st.integers(1, 20), seed=st.integers(0, 99))
def test_awq_words_come_back(rows: int, eights: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, eights * 8), generator=random).to(torch.uint8)
    assert torch.equal(unpack_awq(pack_awq(codes)), codes)
