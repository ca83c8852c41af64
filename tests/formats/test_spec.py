"""Sizes and rules of formats, counted without tensors."""

from dataclasses import replace
from fractions import Fraction

import pytest

from kvq.errors import ConfigError
from kvq.formats import Code, Grouped, KVFormat, PerHead, PerTokenHead, mean_format, parse_format


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("fp32", "32"),
        ("bf16", "16"),
        ("fp16", "16"),
        ("fp8", "8.125"),
        ("fp8_per_head", "8"),
        ("int8", "8.125"),
        ("int8_per_head", "8"),
        ("int4_g32", "5"),
        ("int4_g64", "4.5"),
        ("int4_g128", "4.25"),
        ("int2_g32", "3"),
        ("int2_g128", "2.25"),
        ("int3_g32", "4"),
        ("int5_g64", "5.5"),
        ("int6_g32", "7"),
        ("int2_g32_s8", "2.5"),
        ("int3_g32_s8", "3.5"),
        ("int4_g32_s8", "4.5"),
        ("int4_g64_s8", "4.25"),
        ("int5_g32_s8", "5.5"),
        ("int6_g32_s8", "6.5"),
        ("int6_g16_s8", "7"),
    ],
)
def test_bits_per_element_at_128_are_exact_and_rotation_costs_nothing(name: str, bits: str) -> None:
    assert parse_format(name, 128).bits_per_element(128) == Fraction(bits)
    assert parse_format(name + "_rot", 128).bits_per_element(128) == Fraction(bits)


@pytest.mark.parametrize(
    ("name", "bits"), [("int2", "2.5"), ("int3", "3.5"), ("int4", "4.5"), ("int5", "5.5"), ("int6", "6.5")]
)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_a_bare_name_takes_half_a_bit_more_than_its_codes(name: str, bits: str, head_dim: int) -> None:
    assert parse_format(name, head_dim).bits_per_element(head_dim) == Fraction(bits)


@pytest.mark.parametrize("block_size", [1, 16, 24, 32])
@pytest.mark.parametrize(
    ("head_dim", "groups"), [(48, 1), (60, 1), (64, 1), (80, 2), (96, 2), (128, 2), (192, 4), (256, 4)]
)
def test_a_mean_is_one_row_of_int4_per_block_shared_by_its_tokens(
    head_dim: int, groups: int, block_size: int
) -> None:
    mean = mean_format(head_dim)
    assert (mean.code, mean.is_narrow, mean.rotated, mean.mean) == (Code.INT4, True, False, False)
    assert mean.num_groups(head_dim) == groups
    mean_bytes = head_dim // 2 + 2 * groups
    for name in ("int4", "int2", f"int4_g{head_dim // 4}", f"int2_g{head_dim}_s8_rot"):
        plain = parse_format(name, head_dim)
        fmt = replace(plain, mean=True)
        assert (fmt.mean_bytes(head_dim), plain.mean_bytes(head_dim)) == (mean_bytes, 0)
        row = (fmt.code_bytes(head_dim), fmt.scale_bytes(head_dim))
        assert row == (plain.code_bytes(head_dim), plain.scale_bytes(head_dim))
        per_token = sum(row) + Fraction(mean_bytes, block_size)
        assert fmt.bits_per_element(head_dim, block_size) == 8 * per_token / head_dim
        assert plain.bits_per_element(head_dim, block_size) == Fraction(8 * sum(row), head_dim)
        if block_size == 32:
            assert fmt.bits_per_element(head_dim) == fmt.bits_per_element(head_dim, 32)


def test_codes_of_2_and_3_bits_span_less_than_a_groups_range_with_scales_of_8_bits() -> None:
    spans = {name: parse_format(name, 64).span for name in ("int2", "int3", "int4", "int5", "int6")}
    assert spans == {"int2": 0.8, "int3": 0.9, "int4": 1.0, "int5": 1.0, "int6": 1.0}
    assert parse_format("int2_g32_s8_mean", 64).span == 0.8
    assert [parse_format(name, 64).span for name in ("int2_g32_rot", "int3_g32", "int8", "bf16")] == [1.0] * 4


@pytest.mark.parametrize("head_dim", [48, 60, 64, 80, 96, 128, 192, 256])
def test_bytes_of_a_row_are_codes_plus_scales_and_minimums(head_dim: int) -> None:
    assert parse_format("fp32", head_dim).code_bytes(head_dim) == 4 * head_dim
    assert parse_format("bf16", head_dim).scale_bytes(head_dim) == 0
    for name in ("fp8", "int8"):
        fmt = parse_format(name, head_dim)
        assert (fmt.code_bytes(head_dim), fmt.scale_bytes(head_dim)) == (head_dim, 2)
        static = parse_format(f"{name}_per_head", head_dim)
        assert (static.code_bytes(head_dim), static.scale_bytes(head_dim)) == (head_dim, 0)
    for code in (Code.INT2, Code.INT3, Code.INT4, Code.INT5, Code.INT6):
        if head_dim % code.multiple:
            continue
        code_bytes = head_dim * code.bits // 8
        for size in (head_dim // 4, head_dim // 2, head_dim):
            groups = head_dim // size
            for end, per_group in (("", 4), ("_s8", 2), ("_rot", 4), ("_s8_mean_rot", 2)):
                fmt = parse_format(f"{code}_g{size}{end}", head_dim)
                assert fmt.num_groups(head_dim) == groups
                row = (fmt.code_bytes(head_dim), fmt.scale_bytes(head_dim))
                assert row == (code_bytes, per_group * groups)


def test_static_and_quantized_are_told_from_the_scale_and_the_code() -> None:
    assert [
        parse_format(n, 64).is_static for n in ("fp8_per_head", "int8_per_head_rot", "fp8", "int4", "bf16")
    ] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert [parse_format(n, 64).is_quantized for n in ("fp32", "bf16", "fp16_rot", "fp8", "int2")] == [
        False,
        False,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("code", "scale"),
    [
        (Code.FP32, PerTokenHead()),
        (Code.BF16, Grouped(64)),
        (Code.INT8, None),
        (Code.INT8, Grouped(64)),
        (Code.INT4, PerTokenHead()),
        (Code.INT4, None),
        (Code.INT2, PerHead()),
    ],
)
def test_a_code_with_a_scale_mode_that_is_not_its_own_is_no_format(code: Code, scale: object) -> None:
    with pytest.raises(ConfigError, match="is not a format"):
        KVFormat(code=code, scale=scale)


@pytest.mark.parametrize("name", ["bf16", "fp8", "int8", "int8_per_head_rot"])
def test_only_grouped_codes_have_their_means_taken_out(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"means are taken from grouped codes, such as int4, not (bf|fp|int)"
    ):
        replace(parse_format(name, 64), mean=True)


@pytest.mark.parametrize(
    ("name", "head_dim", "multiple"),
    [
        *(("int4", 63, 2), ("int2", 62, 4), ("int4_g9", 9, 2), ("int6_mean", 62, 4)),
        *(("int3", 60, 8), ("int5_g15_s8", 60, 8)),
    ],
)
def test_a_row_that_does_not_fill_whole_bytes_is_refused(name: str, head_dim: int, multiple: int) -> None:
    with pytest.raises(ConfigError, match=f"multiple of {multiple}, got {head_dim}; use int8 or fp8"):
        parse_format(name, head_dim)
