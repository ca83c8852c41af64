"""Round-to-nearest weights: half a step away at most, at every group size, with and without zero points."""

import pytest
import torch

from kvq.errors import ConfigError
from kvq.formats.weights import parse_weight_format
from kvq.weights import round_weight

FORMATS = [
    "int8",
    "int8_g32",
    "int4_g32",
    "int4",
    "int4_g128_asym",
    "int3_g64",
    "int3_g32_asym",
    "int8_asym",
    "fp8",
]


@pytest.mark.parametrize("name", FORMATS)
def test_no_weight_is_further_than_half_a_step_from_its_code(name: str) -> None:
    fmt = parse_weight_format(name)
    weight = torch.randn(63, 384, generator=torch.Generator().manual_seed(1)) + 0.3
    found = round_weight(weight, fmt)
    error = (found.dequantize() - weight).view(63, found.scale.shape[1], -1).abs()
    steps = found.scale[:, :, None] * (16.0 if name == "fp8" else 0.5)
    assert (error <= steps * 1.001).all()
    assert found.in_features == 384
    assert found.out_features == 63


@pytest.mark.parametrize("name", ["int4_g128_asym", "int3_g32_asym", "int8_asym", "fp8"])
def test_zeros_and_constants_stay_what_they_are(name: str) -> None:
    fmt = parse_weight_format(name)
    weight = torch.zeros(4, 256)
    weight[1], weight[2] = 3.0, -3.0
    assert torch.allclose(round_weight(weight, fmt).dequantize(), weight, rtol=1e-6, atol=0)


def test_groups_that_do_not_fit_are_refused_by_what_fits() -> None:
    with pytest.raises(
        ConfigError, match=r"groups of 128 don't divide 320 inputs; use one of \[64, 32, 16, 8\]"
    ):
        round_weight(torch.ones(8, 320), parse_weight_format("int4"))
