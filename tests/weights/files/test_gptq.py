"""GPTQ: words and zero points written out by hand, versions 1 and 2, and groups in any order."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvq.errors import ConfigError, ModelError
from kvq.formats.checkpoints.scheme import EVERY
from kvq.formats.weights import parse_weight_format
from kvq.kernels.weight import QuantizedWeight
from kvq.weights.files import QuantizationScheme, pack_linear, parse_config, read_linear
from tests.weights.files.helpers import NAME, on_disk, random_weight, unsigned

CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False, "sym": False}


def scheme_of(**changed: object) -> QuantizationScheme:
    return parse_config({**CONFIG, **changed})


def hand_made(qzeros: int, qweight: int = 0x76543210) -> dict[str, Tensor]:
    """8 inputs, 8 outputs; column `o` of the weight is codes 0 to 7, its scale 0.5."""
    return {
        f"{NAME}.qweight": signed([[qweight] * 8]),
        f"{NAME}.qzeros": signed([[qzeros]]),
        f"{NAME}.scales": torch.full((1, 8), 0.5, dtype=torch.float16),
        f"{NAME}.g_idx": torch.zeros(8, dtype=torch.int32),
    }


def signed(words: list[list[int]]) -> Tensor:
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def test_version_1_is_written_symmetric_with_zero_points_minus_one() -> None:
    """q + 8 = 0 to 15 along the inputs; zero point 8 is stored as 7."""
    q = torch.arange(-8, 8, dtype=torch.int8).repeat(8, 1)
    scale = torch.full((8, 2), 0.25, dtype=torch.float16)
    weight = QuantizedWeight.pack(parse_weight_format("int4_g8"), q, scale)
    tensors = pack_linear("autogptq", "a", weight)
    assert unsigned(tensors["a.qweight"]) == [[0x76543210] * 8, [0xFEDCBA98] * 8]
    assert unsigned(tensors["a.qzeros"]) == [[0x77777777], [0x77777777]]
    assert tensors["a.scales"].shape == (2, 8)
    assert tensors["a.scales"].dtype == torch.float16
    assert tensors["a.g_idx"].dtype == torch.int32
    assert tensors["a.g_idx"].tolist() == [0] * 8 + [1] * 8


@pytest.mark.parametrize(
    ("name", "words", "zeros"),
    [
        ("int3_g32", [0x88FAC688, 0xC688FAC6, 0xFAC688FA], [0xDB6DB6DB, 0xB6DB6DB6, 0x6DB6DB6D]),
        ("int8_g32", [0x07060504, 0x0B0A0908], [0x7F7F7F7F] * 8),
    ],
)
def test_words_of_three_and_eight_bits(name: str, words: list[int], zeros: list[int]) -> None:
    """3 bits: 0 to 7 four times, zero points 4 stored as 3. 8 bits: 4, 5, 6 ... and 128 stored as 127."""
    fmt = parse_weight_format(name)
    if fmt.code.bits == 3:
        q = torch.arange(-4, 4, dtype=torch.int8).repeat(32, 4)
    else:
        q = (torch.arange(4, 36) - 128).to(torch.int8).repeat(32, 1)
    weight = QuantizedWeight.pack(fmt, q, torch.ones(32, 1, dtype=torch.float16))
    tensors = pack_linear("autogptq", "a", weight)
    assert [row[0] for row in unsigned(tensors["a.qweight"])][: len(words)] == words
    assert unsigned(tensors["a.qzeros"]) == [zeros]


@pytest.mark.parametrize(
    ("version", "stored", "zero"),
    [("gptq", 0x77777777, 8), ("gptq", 0x22222222, 3), ("gptq_v2", 0x88888888, 8), ("gptq_v2", 0x33333333, 3),
     ("gptq", 0xFFFFFFFF, 0), ("gptq_v2", 0x00000000, 0)],
)  # fmt: skip
def test_zero_points_of_both_versions(version: str, stored: int, zero: int) -> None:
    found = read_linear(scheme_of(checkpoint_format=version), NAME, hand_made(stored))
    expected = (torch.arange(8.0) - zero) * 0.5
    assert torch.equal(found.dequantize().float(), expected.repeat(8, 1))


def test_each_output_has_its_own_zero_point() -> None:
    found = read_linear(scheme_of(checkpoint_format="gptq_v2"), NAME, hand_made(0x76543210))
    assert found.zero is not None
    assert (found.zero + 8).flatten().tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(("version", "right"), [("gptq", 7), ("gptq_v2", 8)])
def test_symmetric_files_have_the_middle_as_zero_point(version: str, right: int) -> None:
    scheme = scheme_of(checkpoint_format=version, sym=True)
    found = read_linear(scheme, NAME, hand_made(0x11111111 * right))
    assert found.zero is None
    assert found.integers()[0].tolist() == list(range(-8, 0))


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize(("version", "stored", "other"), [("gptq", 8, "gptq_v2"), ("gptq_v2", 7, "gptq")])
def test_zero_points_of_the_other_version_are_named_by_it(
    version: str, stored: int, other: str, sym: bool
) -> None:
    tensors = hand_made(0x11111111 * stored)
    with pytest.raises(
        ModelError, match=rf"qzeros .* {other!r}.* {version!r}; say checkpoint_format"
    ) as told:
        read_linear(scheme_of(checkpoint_format=version, sym=sym), NAME, tensors)
    assert "false" not in str(told.value)
    followed = read_linear(scheme_of(checkpoint_format=other, sym=sym), NAME, tensors)
    assert followed.integers()[0].tolist() == list(range(-8, 0)), "what it says helps"


@pytest.mark.parametrize("name", ["int3_g32", "int8_g32"])
def test_other_widths_name_the_other_version_too(name: str) -> None:
    scheme, tensors = on_disk("autogptq", random_weight(name, 32, 96))
    with pytest.raises(ModelError, match="say checkpoint_format: 'gptq'"):
        read_linear(
            replace(scheme, rules=[(EVERY, replace(scheme.layer_of(NAME), version="gptq_v2"))]), NAME, tensors
        )


def test_zero_points_that_differ_need_sym_false_as_the_refusal_says() -> None:
    tensors = hand_made(0x76543210)
    with pytest.raises(ModelError, match=r"qzeros holds zero points, but .* says sym: true; set it to false"):
        read_linear(scheme_of(sym=True), NAME, tensors)
    zero = read_linear(scheme_of(sym=False), NAME, tensors).zero
    assert zero is not None
    assert (zero + 8).flatten().tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_the_format_is_also_called_format() -> None:
    assert scheme_of(format="gptq_v2").version == "gptq_v2"
    assert scheme_of().version == "gptq"


def test_groups_in_any_order_are_sorted() -> None:
    """Inputs 0, 2, 4 ... are of group 1, the others of group 0."""
    tensors = hand_made(0x77777777)
    tensors[f"{NAME}.qweight"] = signed([[0x76543210] * 8, [0xFEDCBA98] * 8])
    tensors[f"{NAME}.qzeros"] = signed([[0x77777777], [0x77777777]])
    tensors[f"{NAME}.scales"] = torch.tensor([[1.0] * 8, [10.0] * 8], dtype=torch.float16)
    tensors[f"{NAME}.g_idx"] = torch.tensor([1, 0] * 8, dtype=torch.int32)
    found = read_linear(scheme_of(desc_act=True), NAME, tensors)
    expected = (torch.arange(16.0) - 8) * torch.tensor([10.0, 1.0] * 8)
    assert torch.equal(found.dequantize().float(), expected.repeat(8, 1))
    assert found.order is not None
    assert found.order.tolist() == [*range(1, 16, 2), *range(0, 16, 2)]


@pytest.mark.parametrize(
    ("index", "message"),
    [([0] * 9 + [1] * 7, "must give each group 8 inputs, got 7 to 9"),
     ([0] * 8 + [2] * 8, "groups 0 to 1, got 0 to 2"),
     ([0] * 8 + [-1] * 8, "groups 0 to 1, got -1 to 0"), ([0] * 8, r"must have shape \[16\]")],
)  # fmt: skip
def test_groups_of_unequal_sizes_are_refused(index: list[int], message: str) -> None:
    scheme, tensors = on_disk("autogptq", random_weight("int4_g8", 8, 16))
    tensors[f"{NAME}.g_idx"] = torch.tensor(index, dtype=torch.int32)
    with pytest.raises(ModelError, match=message) as caught:
        read_linear(scheme, NAME, tensors)
    assert f"{NAME}.g_idx" in str(caught.value)


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(["int8", "int8_g32", "int4_g16", "int4_g32", "int3_g32", "int3_g8", "int8_g8"]),
    out=st.integers(1, 3).map(lambda n: n * 32),
    inputs=st.integers(1, 4).map(lambda n: n * 32),
    ordered=st.booleans(),
    seed=st.integers(0, 999),
)
def test_every_weight_comes_back(name: str, out: int, inputs: int, ordered: bool, seed: int) -> None:
    weight = random_weight(name, out, inputs, seed=seed, ordered=ordered)
    scheme, tensors = on_disk("autogptq", weight)
    assert set(tensors) == set(scheme.names_of(NAME))
    found = read_linear(scheme, NAME, tensors)
    assert found.fmt == weight.fmt
    assert torch.equal(found.dequantize(), weight.dequantize())
    assert torch.equal(found.scale, weight.scale)


@pytest.mark.parametrize(
    ("name", "out", "inputs", "message"),
    [("int3_g8", 24, 96, "needs a multiple of 32 outputs, got 24"), ("int3_g8", 32, 72, "32 inputs, got 72"),
     ("int4_g8", 20, 96, "8 outputs, got 20"), ("int8_g8", 22, 96, "4 outputs, got 22"),
     ("int4_g8_asym", 24, 96, "symmetric int8, int4 and int3"), ("fp8", 24, 96, "write compressed-tensors"),
     ("int8_a8", 24, 96, "write compressed-tensors")],
)  # fmt: skip
def test_what_does_not_fit_is_refused(name: str, out: int, inputs: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pack_linear("autogptq", NAME, random_weight(name, out, inputs))


def test_scales_of_other_types_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"GPTQ keeps fp16 scales, got torch\.float32"):
        pack_linear("autogptq", NAME, random_weight("int4_g8", dtype=torch.float32))


def test_damage_is_named() -> None:
    scheme, tensors = on_disk("autogptq", random_weight("int3_g32", 32, 96))
    for key, bad in [
        ("qweight", torch.zeros(10, 32, dtype=torch.int32)),
        ("qweight", torch.zeros(9, 31, dtype=torch.int32)),
        ("qweight", torch.zeros(9, 0, dtype=torch.int32)),
        ("qweight", torch.zeros(9, dtype=torch.int32)),
        ("qzeros", torch.zeros(3, 4, dtype=torch.int32)),
        ("scales", torch.zeros(4, 32, dtype=torch.float16)),
        ("scales", torch.full((3, 32), float("inf"))),
        ("g_idx", torch.zeros(96)),
    ]:
        with pytest.raises(ModelError, match=f"{NAME}.{key}"):
            read_linear(scheme, NAME, {**tensors, f"{NAME}.{key}": bad})
