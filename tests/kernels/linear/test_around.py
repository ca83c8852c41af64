"""What a layer does around a product in one call with it: bit for bit what the operations give one by one."""

import ctypes

import pytest
import torch

from kvq.kernels import PlainWeight
from kvq.kernels.gated.activation import Activation
from kvq.kernels.gated.cpu import gated
from kvq.kernels.linear.cpu import CpuLinear, rows_of
from kvq.kernels.native.abi import DTYPES, struct
from kvq.kernels.native.library import run
from kvq.kernels.rms_norm.cpu import rms_norm
from tests.kernels.backends import NAMES, kernel
from tests.kernels.linear.kit import weight_of

VARIANTS = [name for name in NAMES if name not in ("triton", "reference")]


@pytest.fixture(autouse=True, params=VARIANTS)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test below holds for every variant of the compiled kernels."""
    kernel("linear_w8", request.param, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fmt", ["plain", "int8", "int4_g64", "w8a8", "fp8"])
@pytest.mark.parametrize("inputs", [64, 1088])
def test_one_call_gives_the_bits_of_several(fmt: str, inputs: int, dtype: torch.dtype) -> None:
    outputs = 152
    source = torch.Generator().manual_seed(1)
    values = 0.1 * torch.randn(outputs, inputs, generator=source).to(dtype)
    linear = CpuLinear(PlainWeight(values=values) if fmt == "plain" else weight_of(fmt, outputs, inputs))
    weight, bias = torch.randn(inputs, generator=source), torch.randn(outputs, generator=source).to(dtype)
    norm = struct("KvqNorm")(weight.data_ptr(), 1e-5, DTYPES[weight.dtype])
    for rows in (1, 37, 1207):
        x = torch.randn(rows, 2 * inputs, generator=source).to(dtype)
        own = torch.randn(rows, 2 * outputs, generator=source).to(dtype)[:, :outputs]
        normed = rms_norm(x[:, :inputs].contiguous(), weight, 1e-5)
        for around, made in (
            (struct("KvqAround")(norm=ctypes.addressof(norm)), normed),
            (
                struct("KvqAround")(gated=1, activation=Activation.SILU),
                gated(x, Activation.SILU),
            ),
        ):
            around.bias = bias.data_ptr()
            around.added, around.added_row = rows_of(own)
            out = torch.empty(rows, outputs, dtype=dtype)
            run("linear_around", linear.struct, around, *rows_of(x), *rows_of(out), DTYPES[dtype], rows, 2)
            assert torch.equal(out, linear(made) + bias + own), rows
