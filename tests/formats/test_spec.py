"""Sizes and rules of formats, counted without tensors."""

from fractions import Fraction

import pytest

from kvq.errors import ConfigError
from kvq.formats import Code, Grouped, KVFormat, PerHead, PerTokenHead, parse_format


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
    ],
)
def test_bits_per_element_at_128_are_exact_and_rotation_costs_nothing(name: str, bits: str) -> None:
    assert parse_format(name, 128).bits_per_element(128) == Fraction(bits)
    assert parse_format(name + "_rot", 128).bits_per_element(128) == Fraction(bits)


@pytest.mark.parametrize("head_dim", [48, 60, 64, 80, 96, 128, 192, 256])
def test_bytes_of_a_row_are_codes_plus_fp16_scales_and_minimums(head_dim: int) -> None:
    assert parse_format("fp32", head_dim).code_bytes(head_dim) == 4 * head_dim
    assert parse_format("bf16", head_dim).scale_bytes(head_dim) == 0
    for name in ("fp8", "int8"):
        fmt = parse_format(name, head_dim)
        assert (fmt.code_bytes(head_dim), fmt.scale_bytes(head_dim)) == (head_dim, 2)
        static = parse_format(f"{name}_per_head", head_dim)
        assert (static.code_bytes(head_dim), static.scale_bytes(head_dim)) == (head_dim, 0)
    for name, per_byte in (("int4", 2), ("int2", 4)):
        fmt = parse_format(name, head_dim)
        assert isinstance(fmt.scale, Grouped)
        groups = head_dim // fmt.scale.group_size
        assert fmt.num_groups(head_dim) == groups
        assert (fmt.code_bytes(head_dim), fmt.scale_bytes(head_dim)) == (head_dim // per_byte, 4 * groups)


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


@pytest.mark.parametrize(
    ("name", "head_dim", "multiple"), [("int4", 63, 2), ("int2", 62, 4), ("int4_g9", 9, 2)]
)
def test_a_row_that_does_not_fill_whole_bytes_is_refused(name: str, head_dim: int, multiple: int) -> None:
    with pytest.raises(ConfigError, match=f"multiple of {multiple}, got {head_dim}; use int8 or fp8"):
        parse_format(name, head_dim)
