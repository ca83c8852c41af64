"""The encoder and decoder of every format against the formulas of the design, written out again."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kvq.formats import Code, Grouped, KVFormat, parse_format
from kvq.kernels.codec import code_dtype, decode, encode, narrow, rotate
from tests.kernels.codec.formulas import F16, F32, HEAD_DIMS, fp16_scale, grouped_row, packed_row, tame

FLOATS = ["fp32", "bf16", "fp16"]
SCALED = ["fp8", "fp8_per_head", "int8", "int8_per_head"]
BARE = ["int2", "int3", "int4", "int5", "int6"]
GROUPED = ["int4_gQ_rot", "int4_gQ", "int2_gQ", "int2_gQ_rot", "int6_gQ_s8"]  # groups of a quarter of a row
ALL = [
    *FLOATS,
    *SCALED,
    "fp32_rot",
    "bf16_rot",
    "fp16_rot",
    "fp8_rot",
    "int8_rot",
    "int8_per_head_rot",
    *BARE,
    *GROUPED,
]


def format_of(name: str, dim: int) -> KVFormat:
    return parse_format(name.replace("gQ", f"g{dim // 4}"), dim)


def fitting(names: list[str], *dims: int) -> list[tuple[str, int]]:
    """Pairs of a name and a head dimension; 3 and 5 bits take multiples of 8 elements."""
    return [
        (name, dim) for dim in dims for name in names if dim % 8 == 0 or not name.startswith(("int3", "int5"))
    ]


def grouped_names(dim: int) -> list[str]:
    """Grouped formats that a row of `dim` elements can take: both kinds of scales, rotated and not."""
    sizes = {48: (24, 48), 60: (10, 60), 80: (20, 40), 96: (48, 96)}.get(dim, (32, dim))
    wide = [f"{code}_g{n}" for code in ("int4", "int2") for n in sizes]
    narrow = [f"{code}_g{sizes[0]}_s8" for code in BARE]
    others = ["int5_gQ", "int3_gQ_rot", "int4_gQ_rot", "int2_gQ_rot", "int6_gQ"]
    return [name for name, _ in fitting([*wide, *narrow, *others, *BARE], dim)]


def static_of(fmt: KVFormat) -> Tensor | None:
    """Static scales for three heads, fp32 [3, 1], or None."""
    return torch.tensor([[0.25], [0.01], [3.0]]) if fmt.is_static else None


@pytest.mark.daily(4)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_grouped_codes_follow_their_formula_code_for_code_and_scale_for_scale(dim: int) -> None:
    x = tame(dim)[::2]
    for name in grouped_names(dim):
        fmt = format_of(name, dim)
        assert isinstance(fmt.scale, Grouped)
        codes, scales = encode(x, fmt)
        assert scales is not None
        assert (codes.dtype, scales.dtype) == (torch.uint8, torch.uint8 if fmt.is_narrow else torch.float16)
        rows = (rotate(x) if fmt.rotated else x).reshape(-1, dim).numpy()
        decoded = decode(codes, scales, fmt).reshape(-1, dim)
        bits = fmt.code.bits
        for i, row in enumerate(rows):
            expected, pairs, values = grouped_row(row, bits, fmt.scale.group_size, narrow=fmt.is_narrow)
            assert codes.reshape(len(rows), -1)[i].tolist() == packed_row(expected, bits), name
            assert scales.reshape(len(rows), -1)[i].tolist() == pairs, name
            assert torch.equal(decoded[i], values), name  # code * scale + minimum


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("name", ["int8", "int8_rot"])
def test_int8_scale_is_fp16_of_amax_over_127_and_codes_round_half_up(name: str, dim: int) -> None:
    x = tame(dim)
    x[0, 0] *= 1e-6  # scales below fp16's smallest normal number
    fmt = parse_format(name, dim)
    codes, scales = encode(x, fmt)
    assert scales is not None
    assert (codes.dtype, scales.dtype) == (torch.int8, torch.float16)
    rows = (rotate(x) if fmt.rotated else x).reshape(-1, dim).numpy()
    for i, row in enumerate(rows):
        s = fp16_scale(np.abs(row).max() / F32(127))
        q = [min(max(math.floor(v / F32(s) + F32(0.5)), -127), 127) for v in row]
        assert scales.flatten()[i].item() == float(s)
        assert codes.reshape(-1, dim)[i].tolist() == q
    assert torch.equal(decode(codes, scales, fmt), codes.float() * scales.float())


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("name", ["fp8", "fp8_rot"])
def test_fp8_scale_is_fp16_of_amax_over_448_and_codes_are_torchs(name: str, dim: int) -> None:
    x = tame(dim)
    x[0, 0] *= 1e-6
    fmt = parse_format(name, dim)
    codes, scales = encode(x, fmt)
    assert scales is not None
    assert (codes.dtype, scales.dtype) == (torch.uint8, torch.float16)
    rows = rotate(x) if fmt.rotated else x
    expected = [float(fp16_scale(a / F32(448))) for a in rows.abs().amax(-1).flatten().numpy()]
    assert scales.flatten().tolist() == expected
    scaled = (rows / scales.float()).clamp(-448, 448)
    assert torch.equal(codes, scaled.to(torch.float8_e4m3fn).view(torch.uint8))
    assert torch.equal(decode(codes, scales, fmt), codes.view(torch.float8_e4m3fn).float() * scales.float())


@pytest.mark.parametrize("name", ["fp8_per_head", "int8_per_head", "fp8_per_head_rot", "int8_per_head_rot"])
def test_static_formats_use_the_given_scale_of_each_head_and_store_none(name: str) -> None:
    fmt = parse_format(name, 60)
    static = static_of(fmt)
    assert static is not None
    x = tame(60)
    codes, scales = encode(x, fmt, static)
    assert scales is None
    scaled = (rotate(x) if fmt.rotated else x) / static
    if fmt.code is Code.INT8:
        expected = torch.floor(scaled + 0.5).clamp(-127, 127).to(torch.int8)
    else:
        expected = scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(codes, expected)
    assert torch.equal(codes[:, 0], encode(x[:, :1], fmt, static[:1])[0][:, 0])
    values = codes.float() if fmt.code is Code.INT8 else codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(decode(codes, None, fmt, static), values * static)


@pytest.mark.parametrize("name", ["fp8_per_head", "int8_per_head"])
def test_a_static_format_is_never_coded_or_decoded_without_its_scale(name: str) -> None:
    fmt = parse_format(name, 64)
    with pytest.raises(AssertionError, match="static scale"):
        encode(tame(64), fmt)
    with pytest.raises(AssertionError, match="needs scales"):
        decode(encode(tame(64), fmt, static_of(fmt))[0], None, fmt)


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_float_formats_store_the_values_as_they_are(name: str, dtype: torch.dtype) -> None:
    x = tame(60)
    codes, scales = encode(x, parse_format(name, 60))
    assert scales is None
    assert torch.equal(codes, x.to(dtype))
    assert torch.equal(decode(codes, None, parse_format(name, 60)), x.to(dtype).float())
    turned, _ = encode(x, parse_format(name + "_rot", 60))
    assert torch.equal(turned, rotate(x).to(dtype))


def test_int8_is_symmetric_and_never_minus_128() -> None:
    x = torch.tensor([[-127.49, -128.0, -1000.0, 127.5, 1000.0, 126.5, -126.5, -0.5, 0.5, 0.49999997]])
    static = torch.ones(1, 1)
    codes, _ = encode(x, parse_format("int8_per_head", 10), static)
    assert codes.tolist() == [[-127, -127, -127, 127, 127, 127, -126, 0, 1, 1]]
    dynamic, _ = encode(-tame(64).abs(), parse_format("int8", 64))
    assert dynamic.min().item() == -127


@pytest.mark.parametrize("name", ["int8", "fp8", "int4_g32", "int2_g32", "int6_g32"])
@pytest.mark.parametrize(
    ("size", "stored"), [(1e-9, 2.0**-24), (1e-38, 2.0**-24), (1e9, 65504.0), (1e38, 65504.0)]
)
def test_scales_are_clamped_to_what_fp16_holds(name: str, size: float, stored: float) -> None:
    x = torch.zeros(1, 64)
    x[0, 5], x[0, 40] = size, size / 2
    _, scales = encode(x, parse_format(name, 64))
    assert scales is not None
    assert scales.flatten()[:: 2 if "_g" in name else 1].unique().tolist() == [stored]


@pytest.mark.parametrize(("name", "dim"), fitting(ALL, *HEAD_DIMS))
def test_zero_rows_decode_to_zero(name: str, dim: int) -> None:
    fmt = format_of(name, dim)
    for zero in (0.0, -0.0):
        codes, scales = encode(torch.full((2, 3, dim), zero), fmt, static_of(fmt))
        assert not decode(codes, scales, fmt, static_of(fmt)).any()


@pytest.mark.parametrize("value", [1.0, -3.140625, 1000.0, 65504.0, -65504.0, 2.0**-24, 6.1035e-05])
@pytest.mark.parametrize("name", ["int4_g32", "int4_g64", "int2_g32", "int2_g64", "int3_g64", "int6_g32"])
def test_a_constant_group_of_an_fp16_value_decodes_to_it_exactly(name: str, value: float) -> None:
    fmt = parse_format(name, 64)
    x = torch.full((1, 64), float(F16(value)))
    if fmt.num_groups(64) == 2:
        x[:, 32:] *= -1  # every group its own constant
    assert torch.equal(decode(*encode(x, fmt), fmt), x.half().float())


@pytest.mark.parametrize("code", BARE)
def test_a_constant_group_with_an_fp16_minimum_decodes_at_least_as_near_as_fp16_would(code: str) -> None:
    constants = torch.cat([torch.logspace(-8, 4.8, 999), -torch.logspace(-8, 4.8, 999)])
    fmt = parse_format(f"{code}_g64", 64)
    x = constants[:, None].expand(-1, 64)
    error = (decode(*encode(x, fmt), fmt) - x).abs()
    assert (error <= (x.half().float() - x).abs() * (1 + 1e-6)).all()


@pytest.mark.parametrize("name", ["int4_g32", "int4_g64", "int2_g32", "int5_g32", "int3_g64"])
@pytest.mark.parametrize("offset", [100.0, -100.0])
def test_a_group_far_from_zero_round_trips(name: str, offset: float) -> None:
    fmt = parse_format(name, 64)
    steps = (1 << fmt.code.bits) - 1
    x = offset + (torch.arange(64) % (steps + 1)).float()[None]  # every level of a scale of exactly 1
    codes, scales = encode(x, fmt)
    assert scales is not None
    assert scales[0, 0::2].unique().tolist() == [1.0]
    assert torch.equal(decode(codes, scales, fmt), x)


def half_step(x: Tensor, fmt: KVFormat, scales: Tensor | None) -> Tensor:
    """How far a decoded element may be from the (rotated) element that was stored."""
    if isinstance(fmt.scale, Grouped):
        assert scales is not None
        pairs = scales.unflatten(-1, (-1, 2))
        pairs = narrow.decode(pairs, fmt.code.bits) if fmt.is_narrow else pairs.float()
        low, high = x.unflatten(-1, (-1, fmt.scale.group_size)).aminmax(dim=-1)
        levels = (1 << fmt.code.bits) - 1
        below, above = pairs[..., 1] - low, high - (pairs[..., 1] + levels * pairs[..., 0])
        step = torch.maximum(0.5 * pairs[..., 0], torch.maximum(below, above))  # what lies outside saturates
        return step.repeat_interleave(fmt.scale.group_size, dim=-1)
    if fmt.code.is_float:
        return x.abs() * {Code.FP32: 0.0, Code.BF16: 2.0**-8, Code.FP16: 2.0**-11}[fmt.code] + 2.0**-25
    scale = static_of(fmt) if fmt.is_static else scales
    assert scale is not None
    if fmt.code is Code.INT8:
        return 0.5 * scale.float().expand_as(x)
    return scale.float() * ((x / scale.float()).abs() * 2.0**-4).clamp(min=2.0**-10)


@pytest.mark.parametrize(("name", "dim"), fitting(ALL, *HEAD_DIMS))
def test_no_element_is_further_off_than_half_a_step(name: str, dim: int) -> None:
    fmt = format_of(name, dim)
    x = tame(dim)
    static = static_of(fmt)
    if static is not None:  # within what the scales were calibrated for
        x = x / x.abs().amax(-1, keepdim=True) * static * 8
    codes, scales = encode(x, fmt, static_of(fmt))
    rows = rotate(x) if fmt.rotated else x
    error = (decode(codes, scales, fmt, static_of(fmt)) - rows).abs()
    excess = error - half_step(rows, fmt, scales) * 1.001 - rows.abs() * 1e-6
    assert excess.max().item() <= 0
    assert error.max().item() > 0 or fmt.code is Code.FP32


def wild(dim: int) -> Tensor:
    """Finite rows that overflow or underflow something on the way. fp32 [rows, 3, dim]."""
    rows = []
    sizes = (1e-45, 1e-38, 1e-8, 65504.0, 65520.0, 1e5, 1e9, 1e38, torch.finfo(torch.float32).max)
    for size in sizes:
        alternating = torch.full((dim,), size)
        alternating[1::2] *= -1
        one = torch.zeros(dim)
        one[dim // 3] = -size
        mixed = torch.linspace(-1, 1, dim) * size
        mixed[0] = 1e-38
        rows += [torch.full((dim,), size), torch.full((dim,), -size), alternating, one, mixed]
    return torch.stack(rows)[:, None].expand(-1, 3, -1)


@pytest.mark.parametrize(("name", "dim"), fitting(ALL, 60, 64, 80, 256))
def test_no_finite_row_ever_becomes_nan_or_infinity(name: str, dim: int) -> None:
    fmt = format_of(name, dim)
    codes, scales = encode(wild(dim), fmt, static_of(fmt))
    if scales is not None:
        assert torch.isfinite(scales).all()
    if fmt.code.is_float:
        assert torch.isfinite(codes.float()).all()
    assert torch.isfinite(decode(codes, scales, fmt, static_of(fmt))).all()


@pytest.mark.parametrize(("name", "largest"), [("fp16", 65504.0), ("bf16", torch.finfo(torch.bfloat16).max)])
def test_float_formats_saturate_at_their_largest_value(name: str, largest: float) -> None:
    huge = torch.finfo(torch.float32).max
    codes, _ = encode(
        torch.tensor([[1e5 if name == "fp16" else huge, -huge, 1.0, largest]]), parse_format(name, 4)
    )
    assert codes.double().tolist() == [[largest, -largest, 1.0, largest]]


@pytest.mark.parametrize(("name", "dim"), [*fitting(ALL, 60), ("int3", 80), ("int5", 80)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_stored_as_zero_and_spoil_no_neighbour(name: str, dim: int, bad: float) -> None:
    fmt = format_of(name, dim)
    x = tame(dim)[:4]
    spoiled, cleaned = x.clone(), x.clone()
    spoiled[1, 2, 7], cleaned[1, 2, 7] = bad, 0.0
    for ours, expected in zip(
        encode(spoiled, fmt, static_of(fmt)), encode(cleaned, fmt, static_of(fmt)), strict=True
    ):
        assert (ours is None) == (expected is None)
        if ours is not None and expected is not None:
            assert torch.equal(ours, expected)


@pytest.mark.parametrize("name", ALL)
def test_a_row_is_coded_alike_alone_strided_and_in_half_precision(name: str) -> None:
    fmt = format_of(name, 96)
    x = tame(96).half()
    whole, scales = encode(x, fmt, static_of(fmt))
    turned, turned_scales = encode(
        x.permute(2, 1, 0).contiguous().permute(2, 1, 0).float(), fmt, static_of(fmt)
    )
    alone, alone_scales = encode(x[5:6], fmt, static_of(fmt))
    assert torch.equal(whole, turned)
    assert torch.equal(whole[5:6], alone)
    if scales is not None and turned_scales is not None and alone_scales is not None:
        assert torch.equal(scales, turned_scales)
        assert torch.equal(scales[5:6], alone_scales)


@pytest.mark.parametrize(("name", "dim"), fitting(ALL, *HEAD_DIMS))
def test_rows_take_the_bytes_that_their_format_says(name: str, dim: int) -> None:
    fmt = format_of(name, dim)
    codes, scales = encode(tame(dim)[:2], fmt, static_of(fmt))
    assert codes.dtype == code_dtype(fmt.code)
    assert codes.shape[-1] * codes.element_size() == fmt.code_bytes(dim)
    assert (0 if scales is None else scales.shape[-1] * scales.element_size()) == fmt.scale_bytes(dim)
