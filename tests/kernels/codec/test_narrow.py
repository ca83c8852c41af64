"""Scales and minimums of a byte each: every byte against its formula, and how far they may be off."""

import pytest
import torch
from torch import Tensor

from kvq.formats import parse_format
from kvq.kernels.codec import decode, encode, narrow
from tests.kernels.codec.formulas import narrow_scale, narrow_value

BITS = [2, 3, 4, 5, 6]
SMALLEST, LARGEST = 2.0**-19, 1920.0  # those that are written


def narrow_format(bits: int, dim: int = 64) -> str:
    return f"int{bits}_g{dim}_s8"


def column(values: list[float]) -> Tensor:
    """fp32 [values, 1]"""
    return torch.tensor(values, dtype=torch.float32)[:, None]


@pytest.mark.parametrize("bits", BITS)
def test_every_pair_of_bytes_decodes_to_the_formula(bits: int) -> None:
    every = torch.cartesian_prod(torch.arange(256), torch.arange(256))
    scales = [(8 + byte % 8) * 2.0 ** (byte // 8 - 23) for byte in range(256)]
    steps = [byte - 256 * (byte > 127) for byte in range(256)]
    expected = [(scales[s], steps[m] * 2.0 ** (bits - 7) * scales[s]) for s, m in every.tolist()]
    assert torch.equal(narrow.decode(every.to(torch.uint8), bits), torch.tensor(expected))
    assert (scales[8], scales[247]) == (SMALLEST, LARGEST)
    assert scales == sorted(set(scales))  # each its own, in the order of the bytes


@pytest.mark.parametrize("bits", BITS)
def test_every_scale_byte_comes_back_from_its_own_range(bits: int) -> None:
    levels = (1 << bits) - 1
    scales = column([narrow_value(byte) for byte in range(8, 248)])
    pairs = narrow.encode(torch.zeros_like(scales), scales * levels, bits)
    assert pairs[:, 0].tolist() == list(range(8, 248))
    assert not pairs[:, 1].any()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("byte", [8, 9, 100, 247])
def test_every_minimum_whose_magnitude_is_within_the_range_comes_back(bits: int, byte: int) -> None:
    scale, levels = narrow_value(byte), (1 << bits) - 1
    reach = levels << (7 - bits)  # steps that make up the range
    steps = range(-min(128, reach), min(127, reach) + 1)
    low = column([step * 2.0 ** (bits - 7) * scale for step in steps])
    pairs = narrow.encode(low, low + levels * scale, bits)
    assert pairs.tolist() == [[byte, step % 256] for step in steps]
    assert torch.equal(narrow.decode(pairs, bits)[:, 1:], low)


def test_scales_are_rounded_to_nearest_with_halves_up_and_clamped() -> None:
    for byte in range(8, 247):
        low, high = narrow_value(byte), narrow_value(byte + 1)
        middle = torch.tensor((low + high) / 2)
        below = torch.nextafter(middle, torch.tensor(0.0))
        wanted = torch.stack([middle, below])[:, None]
        scales = narrow.encode(torch.zeros_like(wanted), wanted * 3, 2)[:, 0].tolist()
        exact = [narrow_scale(float(x), 2) for x in (wanted * 3 / torch.tensor(3.0)).flatten()]
        assert scales == exact
        assert scales[0] == byte + 1
    ends = column([0.0, 1e-45, 1e-30, SMALLEST, LARGEST * 3, 1e9, 1e38, torch.finfo(torch.float32).max])
    assert narrow.encode(torch.zeros_like(ends), ends, 2)[:, 0].tolist() == [8] * 4 + [247] * 4


@pytest.mark.parametrize("bits", [5, 6])
def test_scales_of_wide_codes_are_rounded_up_so_that_no_code_saturates(bits: int) -> None:
    levels = torch.tensor(float((1 << bits) - 1))
    for byte in range(8, 247):
        exact = torch.tensor(narrow_value(byte))
        wanted = torch.stack([exact, torch.nextafter(exact, torch.tensor(1e9))])[:, None] * levels
        scales = narrow.encode(torch.zeros_like(wanted), wanted, bits)[:, 0].tolist()
        assert scales == [narrow_scale(float(x), bits) for x in (wanted / levels).flatten()]
        assert scales[0] == byte


def constants() -> Tensor:
    """Magnitudes of both signs whose scales are in range for all widths, not near powers of two alone."""
    sizes = torch.logspace(-3.5, 3.7, 997)
    return torch.cat([sizes, -sizes])


@pytest.mark.parametrize("bits", BITS)
def test_a_constant_group_is_off_by_half_a_step_of_its_minimum_at_most(bits: int) -> None:
    """The scale is at most 18/17 of |c| / levels, 9/8 where it is rounded up; a minimum's steps are
    2**(bits - 7) of it, and 127 of them reach `levels` scales.
    """
    c, levels = constants(), (1 << bits) - 1
    fmt = parse_format(narrow_format(bits), 64)
    error = (decode(*encode(c[:, None].expand(-1, 64), fmt), fmt) - c[:, None]).abs().amax(-1)
    bound = c.abs() * (9 / 8 if bits > 4 else 18 / 17) / levels * 2.0 ** (bits - 8)
    assert (error <= bound * 1.0001).all()
    assert (error > bound / 2).any()  # the bound is no wider than it must be


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("offset", [0.0, 0.1, 1.0, 30.0])
def test_a_group_of_one_sign_is_off_by_little_of_its_largest_magnitude(bits: int, offset: float) -> None:
    """With R = max(high - low, |low|) and a scale of 16/17 to 18/17 of R / levels, what is lost is at most

    half a scale where codes reach; half a step of the minimum, 2**(bits - 8) scales, beside them; and
    R / 17 above them where the scale was rounded down, which it is not from 5 bits on: there it is up to 9/8
    of R / levels. Codes of 2 and 3 bits leave out a part of the range at either end besides.
    """
    levels, span = (1 << bits) - 1, {2: 0.8, 3: 0.9}.get(bits, 1.0)
    source = torch.Generator().manual_seed(bits)
    x = torch.rand(4000, 64, generator=source) + offset
    x *= torch.logspace(-3, 2, 4000)[:, None]
    fmt = parse_format(narrow_format(bits), 64)
    for rows in (x, -x):
        low, high = rows.aminmax(dim=-1)
        cut = (high - low) * (1 - span) / 2
        reach = torch.maximum(high - low - 2 * cut, (low + cut).abs())
        step = (9 / 8 if bits > 4 else 18 / 17) * reach / levels
        bound = step * (0.5 + 2.0 ** (bits - 8)) + (0 if bits > 4 else reach / 17) + cut
        error = (decode(*encode(rows, fmt), fmt) - rows).abs().amax(-1)
        assert (error <= bound).all()


@pytest.mark.parametrize("bits", [4, 5, 6])
@pytest.mark.parametrize("scale", [SMALLEST, 0.25, 11.0, LARGEST])
def test_a_group_on_the_grid_of_an_exact_scale_round_trips(bits: int, scale: float) -> None:
    levels = (1 << bits) - 1
    fmt = parse_format(narrow_format(bits), 64)
    for low in (0.0, -levels // 2, 8.0 if bits > 4 else 3.0, -levels + 7.0):
        x = ((torch.arange(64) % (levels + 1)) + low)[None] * scale
        codes, scales = encode(x, fmt)
        assert scales is not None
        assert scales[0, 0] == narrow_scale(scale, bits)  # type: ignore[arg-type]
        assert torch.equal(decode(codes, scales, fmt), x)


@pytest.mark.parametrize("bits", BITS)
def test_rows_below_the_smallest_scale_are_off_by_half_of_it_at_most(bits: int) -> None:
    fmt = parse_format(narrow_format(bits), 64)
    for size in (0.0, 1e-45, 1e-30, 4e-7):
        x = torch.linspace(-size, size, 64)[None]
        codes, scales = encode(x, fmt)
        assert scales is not None
        assert scales[0, 0] == 8
        error = (decode(codes, scales, fmt) - x).abs().max().item()
        assert error <= SMALLEST / 2
        assert error == 0 or size > 0
    tiny = torch.full((1, 64), 1e-30)
    assert not decode(*encode(tiny, fmt), fmt).any()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [1e7, 1e38, torch.finfo(torch.float32).max])
def test_rows_beyond_the_largest_scale_saturate_on_their_own_side(bits: int, size: float) -> None:
    x = torch.zeros(3, 64)
    x[0, ::2], x[0, 1::2] = size, -size
    x[1, 5], x[2, 5] = size, -size
    fmt = parse_format(narrow_format(bits), 64)
    decoded, levels = decode(*encode(x, fmt), fmt), (1 << bits) - 1
    bottom = -(2.0**bits) * LARGEST
    assert decoded[0].unique().tolist() == [bottom, bottom + levels * LARGEST]
    assert (decoded[0].sign() == x[0].sign()).any()
    assert decoded[1, 5].item() >= levels * LARGEST / 2
    assert decoded[2, 5].item() == bottom
    assert torch.isfinite(decoded).all()


@pytest.mark.parametrize("bits", BITS)
def test_bytes_do_not_depend_on_what_else_is_encoded_with_a_group(bits: int) -> None:
    rows = torch.randn(50, 64, generator=torch.Generator().manual_seed(bits)) * 7
    fmt = parse_format(f"int{bits}_g16_s8", 64)
    codes, scales = encode(rows, fmt)
    assert scales is not None
    changed = rows.clone()
    changed[:, 16:32] = 1e30
    _, others = encode(changed, fmt)
    assert others is not None
    assert torch.equal(scales[:, [0, 1, 4, 5, 6, 7]], others[:, [0, 1, 4, 5, 6, 7]])
    alone, single = encode(rows[7:8], fmt)
    assert single is not None
    assert torch.equal(codes[7:8], alone)
    assert torch.equal(scales[7:8], single)
