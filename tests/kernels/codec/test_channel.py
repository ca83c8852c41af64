"""Scales per channel of a block: bounds of the error, the bits that pairs share, odd numbers, odd shapes."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from kvq.errors import ConfigError, UnfitFormat
from kvq.formats import KVFormat, parse_format
from kvq.kernels.codec import decode, encode, encode_block, rotate
from kvq.kernels.codec.channel import decoded_scales, shares

GROUPED = [f"int{bits}_per_channel" for bits in (2, 3, 4, 5, 6)]
NAMES = [*GROUPED, "int8_per_channel"]
PAIRED = {2: 1, 3: 2, 4: 2}  # bits, and how many of them a channel takes from the other at most
CASES = [
    *[(name, dim, size) for name in NAMES for dim, size in ((128, 32), (64, 1), (80, 24))],
    *[(name, 60, 16) for name in ("int2_per_channel", "int4_per_channel", "int6_per_channel", NAMES[-1])],
]


def blocks(dim: int, size: int, offset: float = 3.0) -> Tensor:
    """Channels of ranges of 2**-9 to 2**5, offset by some of their ranges. fp32 [3, 2, size, dim]."""
    source = torch.Generator().manual_seed(1000 * dim + size)
    x = torch.randn(3, 2, size, dim, generator=source)
    spread = 2.0 ** torch.randint(-9, 6, (3, 2, 1, dim), generator=source)
    return (x + offset * torch.randn(3, 2, 1, dim, generator=source)) * spread


def stored(x: Tensor, name: str) -> tuple[Tensor, Tensor, KVFormat]:
    fmt = parse_format(name, x.shape[-1])
    codes, scales, means = encode_block(x, fmt)
    assert scales is not None
    assert means is None
    return codes, scales, fmt


@pytest.mark.parametrize(("name", "dim", "size"), CASES)
def test_a_block_takes_the_bytes_that_its_format_says(name: str, dim: int, size: int) -> None:
    codes, scales, fmt = stored(blocks(dim, size), name)
    assert codes.shape == (3, 2, size, fmt.code_bytes(dim))
    assert (scales.dtype, scales.shape) == (torch.uint8, (3, 2, 1, fmt.channel_bytes(dim)))
    assert fmt.scale_bytes(dim) == 0


@pytest.mark.parametrize("offset", [0.0, 3.0, 100.0])
@pytest.mark.parametrize(("name", "dim", "size"), CASES)
def test_an_element_is_off_by_half_a_step_of_its_channels_share(
    name: str, dim: int, size: int, offset: float
) -> None:
    """Beside what lies outside of the codes' range: fp16 rounds the minimum up, or a byte the scale down."""
    x = blocks(dim, size, offset)
    codes, scales, fmt = stored(x, name)
    step, least, bits = decoded_scales(scales, fmt)
    low, high = x.aminmax(dim=-2, keepdim=True)
    error = (decode(codes, scales, fmt) - x).abs()
    slack = 1e-6 * x.abs().amax(-2, keepdim=True)  # fp32 rounds the result
    if name == "int8_per_channel":
        reach = torch.maximum((high - low) / 238, (high + low).abs() / 4064)
        assert (
            step <= (reach * 9 / 8 * 1.0001).clamp(min=2.0**-19)
        ).all()  # a scale byte is rounded up by an eighth at most
        assert (error <= step / 2 + slack).all()
        return
    reach = step * ((1 << bits) - 1)  # of the codes above the minimum
    above, below = (high - least - reach).clamp(min=0), (least - low).clamp(min=0)
    assert (error <= step / 2 + above + below + slack).all()
    assert (below <= low.abs() * 2.0**-11).all()
    rounded_up = fmt.code.bits >= 5
    assert (above <= (0 if rounded_up else (high - least).clamp(min=0) / 17) + slack).all()
    is_normal = high - least > 2.0**-19 * ((1 << fmt.code.bits) - 1)
    assert (reach <= (high - least) * (9 / 8 if rounded_up else 18 / 17) * 1.0001)[is_normal].all()


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("value", [0.0, -0.0, -1.75, 2.5, 2.0**-24, 65504.0, -65504.0])
def test_channels_that_are_constant_come_back_where_fp16_holds_them(name: str, value: float) -> None:
    x = blocks(64, 16)
    x[..., ::3] = value
    codes, scales, fmt = stored(x, name)
    assert torch.equal(decode(codes, scales, fmt)[..., ::3], x[..., ::3])


@pytest.mark.parametrize("value", [-1.7, 2.5, 1e-3, 3e4])
def test_int8_loses_a_4064th_of_a_constant_channel_at_most(value: float) -> None:
    codes, scales, fmt = stored(torch.full((1, 16, 60), value), "int8_per_channel")
    error = (decode(codes, scales, fmt) - value).abs().max()
    assert error <= abs(value) * 9 / 8 / 4064 + 2.0**-20


@pytest.mark.parametrize("name", NAMES)
def test_bytes_do_not_depend_on_what_lies_beside_a_block_or_on_strides(name: str) -> None:
    x = blocks(128, 32)
    codes, scales, fmt = stored(x, name)
    order = torch.tensor([2, 0, 1])
    for other, back in (
        (x[order], lambda y: y[order.argsort()]),
        (x.transpose(0, 1), lambda y: y.transpose(0, 1)),
        (x.mT.contiguous().mT, lambda y: y),
        (x[1:2, 1:].expand(3, 2, -1, -1), lambda y: y),
    ):
        found = encode_block(other, fmt)
        where = (slice(1, 2), slice(1, 2)) if other.stride(0) == 0 else (slice(None),)
        assert torch.equal(back(found[0])[where], codes[where])
        assert torch.equal(back(found[1])[where], scales[where])


@pytest.mark.parametrize("name", NAMES)
def test_a_pair_of_channels_depends_on_itself_alone(name: str) -> None:
    x = blocks(64, 16)
    changed = x.clone()
    changed[..., [5, 58]] *= -37.0
    (codes, scales, fmt), (others, other_scales, _) = stored(x, name), stored(changed, name)
    same = torch.ones(64, dtype=torch.bool)
    same[[5, 58]] = False
    ours, theirs = decode(codes, scales, fmt), decode(others, other_scales, fmt)
    assert torch.equal(ours[..., same], theirs[..., same])
    assert not torch.equal(ours[..., ~same], theirs[..., ~same])


@pytest.mark.parametrize(("bits", "most"), PAIRED.items())
def test_what_one_channel_of_a_pair_gets_the_other_gives(bits: int, most: int) -> None:
    every = torch.cartesian_prod(torch.arange(8, 248), torch.arange(8, 248)).to(torch.int32)
    found = shares(every, bits)  # rows of one pair
    assert (found.sum(-1) == 2 * bits).all()
    assert torch.equal(found - bits, -(found.flip(-1) - bits))
    assert (found.min().item(), found.max().item()) == (bits - most, bits + most)
    more = (every[:, 0] - every[:, 1]).tolist()
    for difference, own in zip(more, found[:, 0].tolist(), strict=True):
        factor = 2.0 ** (abs(difference) / 8)  # of the ranges, but for the scales' mantissas
        shifted = min(most, math.floor(math.log(factor, 4) + 0.5))
        assert own == bits + (shifted if difference > 0 else -shifted)


@pytest.mark.parametrize("bits", PAIRED)
def test_sharing_bits_lessens_the_squared_error_where_ranges_differ(bits: int) -> None:
    x = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(bits))
    x[..., :32] *= 8
    alike = [i if i % 2 else (i + 32) % 64 for i in range(64)]  # i and 63 - i are both wide, or both narrow
    mixed = x[..., alike]

    def loss(rows: Tensor) -> float:
        codes, scales, fmt = stored(rows, f"int{bits}_per_channel")
        return float((decode(codes, scales, fmt) - rows).square().mean())

    assert torch.equal(mixed.sort(-1).values, x.sort(-1).values)
    assert loss(x) < loss(mixed) * 0.75


def test_offsets_of_channels_cost_nothing_that_groups_of_rotated_rows_pay() -> None:
    x, groups = blocks(128, 32, offset=30.0), parse_format("int4_g32_s8_rot", 128)
    codes, scales, fmt = stored(x, "int4_per_channel")
    ours = (decode(codes, scales, fmt) - x).square().mean()
    theirs = (rotate(decode(*encode(x, groups), groups)) - x).square().mean()
    assert ours < theirs / 50


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-40, 1e-30, 1e-6, 1e38, 3.4e38])
def test_rows_of_any_size_leave_finite_rows(name: str, size: float) -> None:
    x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(3)).sign() * size
    codes, scales, fmt = stored(x, name)
    rows = decode(codes, scales, fmt)
    assert torch.isfinite(rows).all()
    if size <= 1e-6:
        assert (rows - x).abs().max() <= 2.0**-19 * 2  # half of the smallest scale, of four levels or more
    else:
        assert (rows * x >= 0).float().mean() >= 0.5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_counts_as_zero(name: str, bad: float) -> None:
    spoiled, cleaned = blocks(80, 16), blocks(80, 16)
    spoiled[1, 0, 3, 7], cleaned[1, 0, 3, 7] = bad, 0.0
    for ours, expected in zip(stored(spoiled, name)[:2], stored(cleaned, name)[:2], strict=True):
        assert torch.equal(ours, expected)


def test_rotated_rows_are_those_of_the_plain_format() -> None:
    x = blocks(60, 16)
    ours, plain = stored(x, "int4_per_channel_rot"), stored(rotate(x), "int4_per_channel")
    assert torch.equal(ours[0], plain[0])
    assert torch.equal(ours[1], plain[1])


def test_bits_an_element_takes() -> None:
    bits = {name: parse_format(name, 128).bits_per_element(128) for name in NAMES}
    assert bits == {name: int(name[3]) + Fraction(16 if name[3] == "8" else 24, 32) for name in NAMES}
    assert bits["int4_per_channel"] == 4.75
    assert parse_format("int4_per_channel", 60).bits_per_element(60, 16) == 5.5


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("int2_per_channel", (62, 63)),
        ("int3_per_channel", (60, 63)),
        ("int4_per_channel", (63, 1)),
        ("int5_per_channel", (60, 63)),
        ("int6_per_channel", (62, 63)),
        ("int8_per_channel", (0,)),
    ],
)
def test_rows_that_fill_no_whole_bytes_are_refused(name: str, dims: tuple[int, ...]) -> None:
    for dim in dims:
        with pytest.raises(UnfitFormat, match="positive multiple"):
            parse_format(name, dim)
    assert parse_format("int8_per_channel", 63).channel_bytes(63) == 126


@pytest.mark.parametrize(
    "name", ["fp8_per_channel", "bf16_per_channel", "int4_per_channel_mean", "int4_g32_per_channel"]
)
def test_codes_without_scales_per_channel_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="per_channel"):
        parse_format(name, 64)
