"""Names of formats: every spelling in, the canonical name out."""

from dataclasses import replace

import pytest

from kvq.errors import ConfigError
from kvq.formats import FOREIGN_NAMES, KVFormat, known_names, parse_format, split_pair
from kvq.formats.spec import Code, Grouped, PerHead, PerTokenHead, legal_group_sizes

TABLE = {
    "fp32": (Code.FP32, None),
    "bf16": (Code.BF16, None),
    "fp16": (Code.FP16, None),
    "fp8": (Code.FP8, PerTokenHead()),
    "fp8_per_token_head": (Code.FP8, PerTokenHead()),
    "fp8_per_head": (Code.FP8, PerHead()),
    "int8": (Code.INT8, PerTokenHead()),
    "int8_per_token_head": (Code.INT8, PerTokenHead()),
    "int8_per_head": (Code.INT8, PerHead()),
    "int4_g32": (Code.INT4, Grouped(32)),
    "int4_g64": (Code.INT4, Grouped(64)),
    "int4_g128": (Code.INT4, Grouped(128)),
    "int2_g32": (Code.INT2, Grouped(32)),
    "int2_g64": (Code.INT2, Grouped(64)),
    "int3_g32": (Code.INT3, Grouped(32)),
    "int5_g16": (Code.INT5, Grouped(16)),
    "int6_g128": (Code.INT6, Grouped(128)),
    "int2_g32_s8": (Code.INT2, Grouped(32, is_narrow=True)),
    "int3_g16_s8": (Code.INT3, Grouped(16, is_narrow=True)),
    "int4_g64_s8": (Code.INT4, Grouped(64, is_narrow=True)),
    "int5_g32_s8": (Code.INT5, Grouped(32, is_narrow=True)),
    "int6_g128_s8": (Code.INT6, Grouped(128, is_narrow=True)),
}
GROUPED = [name for name, (code, _) in TABLE.items() if code.is_grouped]
CODES = {"int2": Code.INT2, "int3": Code.INT3, "int4": Code.INT4, "int5": Code.INT5, "int6": Code.INT6}
ALIASES = {"fp8": "fp8_per_token_head", "int8": "int8_per_token_head"}


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("name", TABLE)
def test_every_name_of_the_table_means_its_code_and_scale(name: str, rotated: bool) -> None:
    fmt = parse_format(name + "_rot" * rotated, 128)
    assert (fmt.code, fmt.scale, fmt.rotated) == (*TABLE[name], rotated)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("name", TABLE)
def test_a_parsed_name_is_canonical_and_reads_back_as_the_same_format(name: str, rotated: bool) -> None:
    fmt = parse_format(name + "_rot" * rotated, 128)
    assert fmt.name == ALIASES.get(name, name) + "_rot" * rotated
    assert parse_format(fmt.name, 128) == fmt


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("name", GROUPED)
def test_mean_follows_the_scales_and_comes_before_the_rotation(name: str, rotated: bool) -> None:
    fmt = parse_format(name + "_mean" + "_rot" * rotated, 128)
    assert (fmt.code, fmt.scale, fmt.rotated, fmt.mean) == (*TABLE[name], rotated, True)
    assert fmt.name == name + "_mean" + "_rot" * rotated
    assert parse_format(name + "_rot" * rotated, 128) == replace(fmt, mean=False)


@pytest.mark.parametrize(
    ("head_dim", "group"),
    [(48, 24), (60, 30), (64, 32), (80, 20), (96, 24), (128, 32), (192, 32), (256, 32)],
)
@pytest.mark.parametrize("name", CODES)
def test_a_bare_name_is_rotated_with_scales_of_8_bits_and_the_largest_legal_group_up_to_32(
    name: str, head_dim: int, group: int
) -> None:
    if head_dim % CODES[name].multiple:
        with pytest.raises(ConfigError, match=f"multiple of 8, got {head_dim}"):
            parse_format(name, head_dim)
        return
    expected = KVFormat(code=CODES[name], scale=Grouped(group, is_narrow=True), rotated=True)
    assert parse_format(name, head_dim) == expected
    assert parse_format(f"{name}_rot", head_dim) == expected
    assert parse_format(name, head_dim).name == f"{name}_g{group}_s8_rot"
    assert parse_format(f"{name}_mean", head_dim) == replace(expected, mean=True)
    assert parse_format(f"{name}_mean_rot", head_dim).name == f"{name}_g{group}_s8_mean_rot"


@pytest.mark.parametrize(
    ("name", "once"), [("int4", "int4_g64_rot"), ("int2", "int2_g32_rot")], ids=["int4", "int2"]
)
def test_what_int4_and_int2_once_meant_keeps_its_name_with_scales_of_16_bits(name: str, once: str) -> None:
    fmt = parse_format(once, 128)
    assert (fmt.is_narrow, fmt.name) == (False, once)
    assert fmt != parse_format(name, 128)


@pytest.mark.parametrize("name", [n for n in known_names() if n != "k8v4"])
def test_every_name_that_errors_advertise_is_accepted(name: str) -> None:
    pair = split_pair(name)
    assert (pair.k, pair.v, pair.note) == (name, name, "")
    parse_format(name, 256)


@pytest.mark.parametrize(
    ("given", "k", "v"),
    [
        ("k8v4", "int8", "int4"),
        ("k16v4", "bf16", "int4"),
        ("k16v8", "bf16", "int8"),
        ("k4v2", "int4", "int2"),
        ("k6v5", "int6", "int5"),
        ("k3v16", "int3", "bf16"),
        ("int3_mean/int4_g64_s8_mean_rot", "int3_mean", "int4_g64_s8_mean_rot"),
        ("K8V4", "int8", "int4"),
        ("int8/int4", "int8", "int4"),
        (" fp8 / int4_g32_rot ", "fp8", "int4_g32_rot"),
        ("fp8_per_head/int8_per_head_rot", "fp8_per_head", "int8_per_head_rot"),
    ],
)
def test_pairs_name_k_and_v_apart(given: str, k: str, v: str) -> None:
    assert (split_pair(given).k, split_pair(given).v) == (k, v)
    assert split_pair(given).note == ""


@pytest.mark.parametrize("foreign", FOREIGN_NAMES)
def test_a_foreign_spelling_is_mapped_with_a_note(foreign: str) -> None:
    pair = split_pair(foreign)
    assert pair.k == pair.v == FOREIGN_NAMES[foreign]
    assert pair.note == f"{foreign} is read as kvq's {pair.k}"
    parse_format(pair.k, 128)


@pytest.mark.parametrize(
    ("foreign", "ours"),
    [("q8_0", "int8"), ("q4_0", "int4_g32"), ("f16", "fp16"), ("fp8_e4m3", "fp8"), ("bfloat16", "bf16")],
)
def test_the_common_foreign_spellings_mean_what_their_engines_mean(foreign: str, ours: str) -> None:
    assert split_pair(foreign).k == ours


def test_a_foreign_pair_notes_each_part_once() -> None:
    assert split_pair("q8_0/q4_0").note == "q8_0 is read as kvq's int8; q4_0 is read as kvq's int4_g32"
    assert split_pair("q8_0/q8_0").note == "q8_0 is read as kvq's int8"


@pytest.mark.parametrize(
    ("given", "meant"),
    [("int7", "int"), ("fp8_per_hed", "fp8_per_head"), ("itn4", "int4"), ("k8v7", "k8v4"), ("q8_1", "q8_0")],
)
def test_an_unknown_name_is_refused_with_the_nearest(given: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown KV format '{given}'; did you mean '{meant}"):
        split_pair(given)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        *[
            ("q4_0", "int4_g32"),
            ("Q8_0", "int8"),
            ("INT4", "int4"),
            ("int4_per_token_head", "int4_g32_s8_rot"),
        ],
        *[("int4_per_chanel", "int4_per_channel"), ("int4_per_channel_s8", "int4_per_channel")],
        *[("int8_channel_rot", "int8_per_channel_rot"), ("fp8_per_channel", "fp8_per_head")],
        *[("int4_s8", "int4_g32_s8"), ("int4_mean_rot_s8", "int4_g32_s8_mean_rot"), ("int4_g", "int4_g32")],
        *[
            ("int4_g64_rto", "int4_g64_rot"),
            ("int3_mean_g16_s8", "int3_g16_s8_mean"),
            ("int4_128", "int4_g128"),
        ],
        *[("int4_g32_rot_s8", "int4_g32_s8_rot"), ("int2_g32s8", "int2_g32_s8"), ("int4-g064", "int4_g64")],
        *[("itn4_g64_men", "int4_g64_mean"), ("int4_rot_rot", "int4_rot"), ("int4_rot_", "int4_rot")],
        *[("int8_g32_rot", "int8_rot"), ("bf16_mean", "bf16"), ("fp8_token_rot", "fp8_per_token_head_rot")],
        *[("int8_per_haed", "int8_per_head"), ("int4_per_head", "int4"), ("int4_g1234567", "int4_g128")],
    ],
)
def test_a_hint_has_the_words_of_the_name_in_their_order_and_is_a_name(given: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown KV format '{given}'; did you mean '{meant}'\?"):
        parse_format(given, 128)
    parse_format(meant, 128)


@pytest.mark.parametrize("given", ["k8v4", "K4V2", "int8/int4"])
def test_a_pair_where_one_format_goes_is_told_apart(given: str) -> None:
    with pytest.raises(ConfigError, match=f"'{given}'; a pair is two formats, and here is room for one; kvq"):
        parse_format(given, 128)


def test_of_a_pair_the_half_that_is_no_name_is_shown() -> None:
    with pytest.raises(ConfigError, match="'int4_s8' in 'int8/INT4_S8'; did you mean 'int4_g32_s8'"):
        split_pair("int8/INT4_S8")


@pytest.mark.parametrize("name", ["int3", "int5_g8", "int3_g30_s8_mean"])
def test_rows_that_end_within_a_byte_are_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match="whole bytes only where head_dim is a positive multiple of 8, got 60"
    ):
        parse_format(name, 60)


@pytest.mark.parametrize(
    "given",
    [
        *("", "/", "int8/", "/int8", "int8/int4/int2", "int4_g", "int4_g-4", "_rot", "int4_rot_rot", "auto"),
        *("int4_s8", "int4_s8_rot", "int4_g32_s4", "int4_g32_s8_s8", "int8_s8", "bf16_s8", "int4_g32s8"),
        *("int4_rot_mean", "int4_g32_mean_s8", "int4_g32_rot_s8", "int4_mean_g32", "int4_mean_mean"),
        *("int8_mean", "bf16_mean_rot", "fp8_per_head_mean", "mean", "int7", "int4_g32_s8_mean_rot_"),
    ],
)
def test_what_is_no_name_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="unknown KV format"):
        split_pair(given)


def test_a_refusal_without_a_near_name_still_reads_as_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"unknown KV format '@@@'; kvq knows fp32, bf16"):
        split_pair("@@@")


@pytest.mark.parametrize("given", ["nope", "int4_g", "k8v4", "fp8_per_heads", "int4_per_token_head"])
def test_parse_format_refuses_unknown_names_itself(given: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown KV format '{given}'"):
        parse_format(given, 128)


@pytest.mark.parametrize(
    ("group", "head_dim"), [(32, 80), (64, 80), (64, 64 + 32), (7, 64), (128, 64), (0, 64)]
)
def test_a_group_size_that_does_not_fit_lists_what_fits(group: int, head_dim: int) -> None:
    fits = [n for n in range(4, head_dim + 1) if n == head_dim or (head_dim // 2) % n == 0]
    for name in (f"int4_g{group}", f"int2_g{group}", f"int6_g{group}_s8", f"int3_g{group}_s8_mean_rot"):
        with pytest.raises(ConfigError) as refused:
            parse_format(name, head_dim)
        assert f"head_dim={head_dim}" in str(refused.value)
        assert f"got {group}" in str(refused.value)
        assert f"use one of {fits}" in str(refused.value)


@pytest.mark.parametrize("head_dim", [48, 60, 64, 80, 96, 128, 192, 256])
def test_no_legal_group_straddles_the_two_halves_of_a_packed_row(head_dim: int) -> None:
    half = head_dim // 2
    for size in legal_group_sizes(head_dim):
        if size != head_dim:
            starts = range(0, head_dim, size)
            assert all(at + size <= half or at >= half for at in starts), size
            assert head_dim % size == 0
        parse_format(f"int4_g{size}", head_dim)
        parse_format(f"int4_g{size}_s8_mean", head_dim)
