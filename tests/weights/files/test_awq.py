"""AWQ: words in its order of columns, written out by hand. AutoAWQ itself: tools/check_autoawq.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.errors import ConfigError, ModelError
from kvq.formats.weights import parse_weight_format
from kvq.kernels.weight import QuantizedWeight
from kvq.weights.files import pack_linear, parse_config, read_linear
from tests.weights.files.helpers import NAME, on_disk, random_weight, unsigned

CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm"}


def test_words_zero_points_and_scales() -> None:
    """Row o of the weight is code o for every input, with zero point 15 - o and scale 0.5."""
    q = (torch.arange(8) - 8).to(torch.int8)[:, None].repeat(1, 16)
    zero = (7 - torch.arange(8)).to(torch.int8)[:, None].repeat(1, 2)
    scale = torch.full((8, 2), 0.5, dtype=torch.float16)
    weight = QuantizedWeight.pack(parse_weight_format("int4_g8_asym"), q, scale, zero)
    tensors = pack_linear("autoawq", "a", weight)
    assert unsigned(tensors["a.qweight"]) == [[0x75316420]] * 16
    assert unsigned(tensors["a.qzeros"]) == [[0x8ACE9BDF]] * 2
    assert tensors["a.scales"].shape == (2, 8)
    assert tensors["a.scales"].dtype == torch.float16


def test_hand_made_words_are_read() -> None:
    tensors = {
        f"{NAME}.qweight": torch.tensor([[0x75316420]] * 8, dtype=torch.int32),
        f"{NAME}.qzeros": torch.tensor([[0x33333333]], dtype=torch.int32),
        f"{NAME}.scales": torch.arange(1, 9, dtype=torch.float16)[None],
    }
    found = read_linear(parse_config(CONFIG), NAME, tensors)
    expected = (torch.arange(8.0) - 3) * torch.arange(1.0, 9.0)
    assert torch.equal(found.dequantize().float(), expected[:, None].repeat(1, 8))


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(["int4_g8", "int4_g32", "int4_g32_asym", "int4_g8_asym", "int4_g96_asym"]),
    out=st.integers(1, 6).map(lambda n: n * 8),
    inputs=st.integers(1, 3).map(lambda n: n * 96),
    seed=st.integers(0, 999),
)
def test_every_weight_comes_back(name: str, out: int, inputs: int, seed: int) -> None:
    weight = random_weight(name, out, inputs, seed=seed)
    scheme, tensors = on_disk("autoawq", weight)
    assert set(tensors) == set(scheme.names_of(NAME))
    found = read_linear(scheme, NAME, tensors)
    assert torch.equal(found.codes, weight.codes)
    assert torch.equal(found.dequantize(), weight.dequantize())


def test_files_without_zero_points_have_the_middle() -> None:
    scheme = parse_config({**CONFIG, "zero_point": False})
    weight = random_weight("int4_g8")
    tensors = pack_linear("autoawq", NAME, weight)
    found = read_linear(scheme, NAME, tensors)
    assert found.zero is None
    assert torch.equal(found.dequantize(), weight.dequantize())
    tensors = pack_linear("autoawq", NAME, random_weight("int4_g8_asym"))
    with pytest.raises(ModelError, match=r"qzeros holds zero points, but .* zero_point: false"):
        read_linear(scheme, NAME, tensors)


@pytest.mark.parametrize(
    ("name", "out", "message"),
    [("int4_g8", 20, "a multiple of 8 outputs, got 20"), ("int8_g8", 24, "holds int4 weights, got int8_g8"),
     ("int3_g8", 24, "int4"), ("int4_g8_a8", 24, "int4 weights")],
)  # fmt: skip
def test_what_does_not_fit_is_refused(name: str, out: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pack_linear("autoawq", NAME, random_weight(name, out))


def test_scattered_groups_and_other_scales_are_refused() -> None:
    with pytest.raises(ConfigError, match="act-order"):
        pack_linear("autoawq", NAME, random_weight("int4_g8", ordered=True))
    with pytest.raises(ConfigError, match=r"AWQ keeps fp16 scales, got torch\.bfloat16"):
        pack_linear("autoawq", NAME, random_weight("int4_g8", dtype=torch.bfloat16))


def test_damage_is_named() -> None:
    scheme, tensors = on_disk("autoawq", random_weight("int4_g32_asym"))
    for key, bad in [
        ("qweight", torch.zeros(97, 3, dtype=torch.int32)),
        ("qweight", torch.zeros(96, 3, dtype=torch.int64)),
        ("qzeros", torch.zeros(2, 3, dtype=torch.int32)),
        ("scales", torch.zeros(3, 32, dtype=torch.float16)),
        ("scales", torch.zeros(3, 24, dtype=torch.int32)),
    ]:
        with pytest.raises(ModelError, match=NAME):
            read_linear(scheme, NAME, {**tensors, f"{NAME}.{key}": bad})
