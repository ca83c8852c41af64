"""Blocks whose mean is taken out: means and what is left, byte for byte, and what it is good for."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kvq.formats import Grouped, KVFormat, mean_format, parse_format
from kvq.kernels.codec import decode, decode_means, encode, encode_block, rotate
from tests.kernels.codec.formulas import F32, grouped_row, packed_row

NAMES = ["int4_mean", "int2_mean", "int6_gQ_s8_mean", "int4_gQ_mean_rot", "int2_gQ_mean"]
CASES = [  # 3 and 5 bits take multiples of 8 elements
    *[(name, dim) for name in NAMES for dim in (60, 80, 96, 128)],
    *[(name, dim) for name in ("int3_mean", "int5_mean") for dim in (80, 96)],
]


def format_of(name: str, dim: int) -> KVFormat:
    return parse_format(name.replace("gQ", f"g{dim // 4}"), dim)


def block(size: int, dim: int, heads: int = 2) -> Tensor:
    """Rows that share an offset per channel, with an outlier. fp32 [heads, size, dim]."""
    source = torch.Generator().manual_seed(100 * dim + size)
    x = torch.randn(heads, size, dim, generator=source) + 4 * torch.randn(heads, 1, dim, generator=source)
    x[0, size // 2, dim // 3] = 60.0
    return x


def mean_row(rows: np.ndarray) -> np.ndarray:
    """The fp32 sum of rows [size, dim], one after the other, over their number."""
    total = rows[0].astype(F32).copy()
    for row in rows[1:]:
        total = total + row.astype(F32)
    return total / F32(len(rows))


@pytest.mark.parametrize("size", [1, 16, 24, 32])
@pytest.mark.parametrize(("name", "dim"), CASES)
def test_means_and_what_is_left_follow_their_formula_byte_for_byte(name: str, dim: int, size: int) -> None:
    fmt, stored = format_of(name, dim), mean_format(dim)
    assert isinstance(fmt.scale, Grouped)
    assert isinstance(stored.scale, Grouped)
    x = block(size, dim)
    codes, scales, means = encode_block(x, fmt)
    assert scales is not None
    assert means is not None
    assert (means.dtype, means.shape) == (torch.uint8, (2, fmt.mean_bytes(dim)))
    rows = (rotate(x) if fmt.rotated else x).numpy()
    for head in range(len(rows)):
        mean = mean_row(rows[head])
        packed, pairs, value = grouped_row(mean, 4, stored.scale.group_size, narrow=True)
        assert means[head].tolist() == [*packed_row(packed, 4), *pairs]
        assert torch.equal(decode_means(means, dim)[head], value)
        for token in range(size):
            left = rows[head, token] - value.numpy()
            expected, pairs, _ = grouped_row(left, fmt.code.bits, fmt.scale.group_size, narrow=fmt.is_narrow)
            assert codes[head, token].tolist() == packed_row(expected, fmt.code.bits)
            assert scales[head, token].tolist() == pairs


@pytest.mark.parametrize("name", ["bf16_rot", "int8", "int8_per_head", "int4", "int2_g16"])
def test_without_means_a_block_is_its_rows(name: str) -> None:
    fmt, x = parse_format(name, 64), block(16, 64)
    static = torch.tensor([[[0.2]], [[0.5]]]) if fmt.is_static else None
    codes, scales, means = encode_block(x, fmt, static)
    assert means is None
    expected = encode(x, fmt, static)
    assert torch.equal(codes, expected[0])
    assert (scales is None) == (expected[1] is None)
    if scales is not None and expected[1] is not None:
        assert torch.equal(scales, expected[1])


@pytest.mark.parametrize("name", NAMES)
def test_a_heads_bytes_depend_on_its_own_rows_alone(name: str) -> None:
    x = block(24, 80, heads=3)
    changed = x.clone()
    changed[1] *= -3
    whole, other = encode_block(x, format_of(name, 80)), encode_block(changed, format_of(name, 80))
    alone = encode_block(x[2], format_of(name, 80))
    for ours, theirs, single in zip(whole, other, alone, strict=True):
        assert ours is not None
        assert theirs is not None
        assert single is not None
        assert torch.equal(ours[[0, 2]], theirs[[0, 2]])
        assert torch.equal(ours[2], single)
        assert not torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_counts_as_zero_in_means_too(name: str, bad: float) -> None:
    spoiled, cleaned = block(16, 60), block(16, 60)
    spoiled[1, 3, 7], cleaned[1, 3, 7] = bad, 0.0
    fmt = format_of(name, 60)
    for ours, expected in zip(encode_block(spoiled, fmt), encode_block(cleaned, fmt), strict=True):
        assert ours is not None
        assert expected is not None
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e6, 1e37])
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_any_size_leave_finite_bytes_and_zeros_stay_zeros(name: str, size: float) -> None:
    fmt = format_of(name, 64)
    codes, scales, means = encode_block(block(16, 64) * size, fmt)
    assert means is not None
    rows = decode(codes, scales, fmt) + decode_means(means, 64)[:, None]
    assert torch.isfinite(rows).all()
    assert rows.any().item() is (size > 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_common_offset_costs_less_error_with_means(name: str) -> None:
    x, fmt = block(32, 128), format_of(name, 128)
    rows = rotate(x) if fmt.rotated else x
    codes, scales, means = encode_block(x, fmt)
    assert means is not None
    with_means = (decode(codes, scales, fmt) + decode_means(means, 128)[:, None] - rows).square().mean()
    plain = replace(fmt, mean=False)
    without = (decode(*encode(x, plain), plain) - rows).square().mean()
    assert with_means < without / 2


def test_clipping_applies_to_what_is_left_and_not_to_means() -> None:
    fmt, x = parse_format("int2_g32_mean_rot", 64), block(16, 64)
    whole, clipped = encode_block(x, fmt), encode_block(x, fmt, clip=0.7)
    assert whole[2] is not None
    assert clipped[2] is not None
    assert torch.equal(whole[2], clipped[2])
    left = rotate(x) - decode_means(whole[2], 64)[:, None]
    expected = encode(left, parse_format("int2_g32", 64), clip=0.7)
    assert torch.equal(clipped[0], expected[0])
    assert not torch.equal(clipped[0], whole[0])
