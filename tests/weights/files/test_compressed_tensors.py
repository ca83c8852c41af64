"""compressed-tensors: words written out by hand, and bits equal to what the package reads and writes."""

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.errors import ConfigError, ModelError
from kvq.formats.weights import parse_weight_format
from kvq.kernels.weight import QuantizedWeight
from kvq.weights import round_weight
from kvq.weights.files import pack_linear, parse_config, quantization_config, read_linear
from tests.weights.files.helpers import NAME, on_disk, random_weight, unsigned

FORMATS = [
    "int8", "int8_g32", "int8_asym", "int8_g32_asym", "int4_g32", "int4_g96", "int4_g32_asym", "int3_g32",
    "int3_g32_asym", "int3_g96", "int8_a8", "int8_g32_a8", "int8_asym_a8", "int4_g32_a8", "int3_g32_a8",
    "fp8", "fp8_a8",
]  # fmt: skip
PREFIX = f"{NAME}."


def own_config(name: str) -> QuantizationConfig:
    config = quantization_config(
        "compressed-tensors", {NAME: parse_weight_format(name)}, ["lm_head"], kv_scales=True
    )
    return QuantizationConfig(**config)


def test_int4_words_scales_zero_points_and_shape() -> None:
    """q = -8 to 7 along the inputs is 0x76543210, 0xFEDCBA98; zero points -8 to -1 of eight rows one word."""
    q = torch.arange(-8, 8, dtype=torch.int8).repeat(8, 1)
    scale = torch.full((8, 1), 0.5, dtype=torch.float16)
    zero = torch.arange(-8, 0, dtype=torch.int8)[:, None]
    fmt = parse_weight_format("int4_g16_asym")
    tensors = pack_linear("compressed-tensors", "a", QuantizedWeight.pack(fmt, q, scale, zero))
    assert unsigned(tensors["a.weight_packed"]) == [[0x76543210, 0xFEDCBA98]] * 8
    assert unsigned(tensors["a.weight_zero_point"]) == [[0x76543210]]
    assert tensors["a.weight_shape"].dtype == torch.int64
    assert tensors["a.weight_shape"].tolist() == [8, 16]
    assert tensors["a.weight_scale"].shape == (8, 1)


def test_int3_words() -> None:
    q = torch.arange(-4, 4, dtype=torch.int8).repeat(1, 4)
    weight = QuantizedWeight.pack(parse_weight_format("int3_g32"), q, torch.ones(1, 1))
    tensors = pack_linear("compressed-tensors", "a", weight)
    assert unsigned(tensors["a.weight_packed"]) == [[0x88FAC688, 0xC688FAC6, 0xFAC688FA]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FORMATS)
def test_the_package_dequantizes_our_tensors_to_our_bits(name: str, dtype: torch.dtype) -> None:
    weight = random_weight(name, dtype=dtype)
    _, tensors = on_disk("compressed-tensors", weight)
    scheme = own_config(name).config_groups["group_0"]
    own = {key.removeprefix(PREFIX): tensor for key, tensor in tensors.items()}
    theirs = BaseCompressor.get_value_from_registry(scheme.format).decompress(own, scheme)["weight"]
    assert theirs.dtype == dtype
    assert torch.equal(theirs, weight.dequantize())


@pytest.mark.parametrize("name", FORMATS)
def test_we_read_what_the_package_writes(name: str) -> None:
    """From the same scales and zero points; equal tensors, so equal codes, too."""
    fmt = parse_weight_format(name)
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(3))
    rounded = round_weight(weight, fmt)
    state = {"weight": weight, "weight_scale": rounded.scale}
    if rounded.zero is not None:
        state["weight_zero_point"] = rounded.zero
    scheme = own_config(name).config_groups["group_0"]
    theirs = BaseCompressor.get_value_from_registry(scheme.format).compress(state, scheme)
    config, ours = on_disk("compressed-tensors", rounded)
    assert {PREFIX + key for key in theirs} == set(ours) == set(config.names_of(NAME))
    for key, tensor in theirs.items():
        assert tensor.dtype == ours[PREFIX + key].dtype, key
        assert tensor.shape == ours[PREFIX + key].shape, key
    found = read_linear(config, NAME, {PREFIX + key: tensor for key, tensor in theirs.items()})
    decompressed = BaseCompressor.get_value_from_registry(scheme.format).decompress(theirs, scheme)["weight"]
    assert torch.equal(found.dequantize(), decompressed)


@settings(deadline=None, max_examples=80)
@given(
    name=st.sampled_from(["int8", "int8_g8_asym", "int4_g8", "int4_g24_asym", "int3_g8_asym", "int4_g8_a8",
                          "int3_g24", "int8_g24_a8", "fp8", "fp8_a8"]),
    out=st.integers(1, 40),
    inputs=st.integers(1, 6).map(lambda n: n * 24),
    seed=st.integers(0, 999),
)  # fmt: skip
def test_every_weight_comes_back(name: str, out: int, inputs: int, seed: int) -> None:
    weight = random_weight(name, out, inputs, seed=seed)
    scheme, tensors = on_disk("compressed-tensors", weight)
    found = read_linear(scheme, NAME, tensors)
    assert found.fmt == weight.fmt
    assert torch.equal(found.codes, weight.codes)
    assert torch.equal(found.scale, weight.scale)
    assert (found.zero is None) == (weight.zero is None)
    assert found.zero is None or torch.equal(found.zero, weight.zero)


def test_scattered_groups_are_refused_and_whole_rows_put_back_in_order() -> None:
    with pytest.raises(ConfigError, match="can't hold groups of scattered inputs"):
        pack_linear("compressed-tensors", NAME, random_weight("int4_g32", ordered=True))
    weight = random_weight("int8", ordered=True)
    tensors = pack_linear("compressed-tensors", NAME, weight)
    scheme, _ = on_disk("compressed-tensors", random_weight("int8"))
    assert torch.equal(read_linear(scheme, NAME, tensors).dequantize(), weight.dequantize())


@pytest.mark.parametrize("actorder", ["group", "dynamic"])
def test_the_order_of_inputs_of_older_versions_is_read(actorder: str) -> None:
    """Columns lie in their own order, weight_g_idx int32 names the group of each."""
    config = quantization_config(
        "compressed-tensors", {NAME: parse_weight_format("int4_g8")}, [], kv_scales=False
    )
    config["config_groups"]["group_0"]["weights"]["actorder"] = actorder
    scheme = parse_config(config)
    q = torch.arange(-8, 8, dtype=torch.int8).repeat(2, 1)
    scale = torch.tensor([[1.0, 10.0], [2.0, 20.0]])
    tensors = pack_linear(
        "compressed-tensors", NAME, QuantizedWeight.pack(parse_weight_format("int4_g8"), q, scale)
    )
    tensors[f"{NAME}.weight_g_idx"] = torch.tensor([0, 1] * 8, dtype=torch.int32)
    assert set(tensors) == set(scheme.names_of(NAME))
    found = read_linear(scheme, NAME, tensors)
    expected = q.float() * scale[:, torch.tensor([0, 1] * 8)]
    assert torch.equal(found.dequantize(), expected)
    assert found.order is not None
    assert found.order.tolist() == [*range(0, 16, 2), *range(1, 16, 2)]


def test_damage_is_named() -> None:
    scheme, tensors = on_disk("compressed-tensors", random_weight("int4_g32_asym"))
    for key, bad, message in [
        ("weight_packed", torch.zeros(24, 11, dtype=torch.int32), "weight_packed of 4 bits has shape"),
        ("weight_packed", torch.zeros(24, 12), "must be int32, got float32"),
        ("weight_shape", torch.tensor([24, 1 << 40]), "weight_shape says"),
        ("weight_shape", torch.tensor([24, 104]), "weight_shape says"),
        ("weight_shape", torch.tensor([24, -96]), "weight_shape says"),
        ("weight_shape", torch.tensor([24]), r"must have shape \[2\]"),
        ("weight_scale", torch.ones(24, 4, dtype=torch.float16), r"must have shape \[24, 3\], got \[24, 4\]"),
        ("weight_scale", torch.full((24, 3), float("nan")), "holds NaN or infinity"),
        ("weight_zero_point", torch.zeros(24, 3, dtype=torch.int8), "must be int32"),
        ("weight_zero_point", torch.zeros(4, 3, dtype=torch.int32), r"must have shape \[3, 3\]"),
    ]:
        with pytest.raises(ModelError, match=message) as caught:
            read_linear(scheme, NAME, {**tensors, PREFIX + key: bad})
        assert PREFIX + key in str(caught.value)
    del tensors[f"{NAME}.weight_scale"]
    with pytest.raises(ModelError, match="weight_scale is missing"):
        read_linear(scheme, NAME, tensors)


def test_codes_that_four_bits_cannot_hold_and_nan_bytes_are_refused() -> None:
    config = quantization_config(
        "compressed-tensors", {NAME: parse_weight_format("int4_g32_a8")}, [], kv_scales=False
    )
    config["format"] = config["config_groups"]["group_0"]["format"] = "int-quantized"
    scheme = parse_config(config)
    q = torch.randint(-8, 8, (24, 96)).to(torch.int8)
    tensors = {f"{NAME}.weight": q, f"{NAME}.weight_scale": torch.ones(24, 3)}
    assert torch.equal(read_linear(scheme, NAME, tensors).integers(), q)
    q[3, 3] = 8
    with pytest.raises(ModelError, match="weight must hold -8 to 7, got -8 to 8"):
        read_linear(scheme, NAME, tensors)
    scheme, tensors = on_disk("compressed-tensors", random_weight("fp8"))
    tensors[f"{NAME}.weight"].view(torch.uint8)[1, 1] = 0xFF
    with pytest.raises(ModelError, match="weight holds NaN"):
        read_linear(scheme, NAME, tensors)


def test_groups_that_do_not_divide_are_a_model_error() -> None:
    scheme, _ = on_disk("compressed-tensors", random_weight("int4_g32"))
    tensors = pack_linear("compressed-tensors", NAME, random_weight("int4_g24"))
    with pytest.raises(ModelError, match=r"groups of 32 don't divide 72 inputs|must have shape"):
        read_linear(scheme, NAME, tensors)
