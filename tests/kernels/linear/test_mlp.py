"""The gated MLP in one call: the bits of its three parts, and their values against torch."""

import pytest
import torch

from kvq.errors import ConfigError
from kvq.kernels.gated.cpu import gated
from kvq.kernels.gated.reference import COMPILED, Activation
from kvq.kernels.linear.cpu import CpuLinear, CpuMLP
from kvq.kernels.native import library
from tests.kernels.backends import NAMES
from tests.kernels.linear.kit import rows_of, weight_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True, params=[name for name in NAMES if name.startswith("cpu:")])
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test below holds for every variant."""
    name: str = request.param
    chosen = next(x for x in library.variants() if x.variant == name.partition(":")[2])
    monkeypatch.setattr(library, "load", lambda: chosen)
    return name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["int8", "int4_g32", "w8a8", "fp8"])
def test_one_call_gives_the_bits_of_three(name: str, dtype: torch.dtype) -> None:
    gate, up, down = weight_of(name, 96, 64), weight_of(name, 96, 64), weight_of(name, 37, 96)
    joined, last = CpuLinear(gate, up), CpuLinear(down)
    for rows in (1, 2, 23, 520, 0):
        x = (0.02 * rows_of(rows, 64)).to(dtype)  # products that fp16 holds
        for activation in COMPILED:
            got = CpuMLP(joined, last, activation)(x)
            assert torch.equal(got, last(gated(joined(x), activation))), rows


def test_parts_that_do_not_fit_are_refused() -> None:
    a, b = CpuLinear(weight_of("int8", 96, 64)), CpuLinear(weight_of("int8", 37, 96))
    with pytest.raises(ConfigError, match="half as many"):
        CpuMLP(a, b, Activation.SILU)
    with pytest.raises(ConfigError, match="GELU has no C"):
        CpuMLP(a, CpuLinear(weight_of("int8", 37, 48)), Activation.GELU)
    with pytest.raises(ConfigError, match="inputs must be"):
        CpuMLP(CpuLinear(weight_of("int8", 192, 64)), b, Activation.SILU)(torch.zeros(3, 60))
