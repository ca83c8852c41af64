"""What a layer does around a product in one call with it: bit for bit what the operations give one by one."""

import ctypes

import pytest
import torch
from torch import Tensor

from kvq.kernels import PlainWeight, QuantizedWeight
from kvq.kernels.gated.cpu import gated
from kvq.kernels.gated.reference import Activation
from kvq.kernels.linear.cpu import CpuLinear
from kvq.kernels.native.abi import DTYPES, rows_of, struct
from kvq.kernels.native.library import run
from kvq.kernels.rms_norm.cpu import rms_norm
from tests.kernels.backends import NAMES, kernel
from tests.kernels.linear.kit import weight_of

VARIANTS = [name for name in NAMES if name not in ("triton", "reference")]
OUTPUTS = 152  # not whole panels


@pytest.fixture(autouse=True, params=VARIANTS)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test below holds for every variant of the compiled kernels."""
    kernel("linear_w8", request.param, monkeypatch)


def around(linear: CpuLinear, x: Tensor, *, out: Tensor, **given: object) -> Tensor:
    sizes = DTYPES[x.dtype], len(x), 2
    run("linear_around", linear.struct, struct("KvqAround")(**given), *rows_of(x), *rows_of(out), *sizes)
    return out


def weight(fmt: str, inputs: int, dtype: torch.dtype) -> PlainWeight | QuantizedWeight:
    if fmt != "plain":
        return weight_of(fmt, OUTPUTS, inputs, ordered=inputs == 1088)
    source = torch.Generator().manual_seed(2)
    return PlainWeight(values=0.1 * torch.randn(OUTPUTS, inputs, generator=source).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("fmt", "inputs"),
    [
        ("plain", 37),
        ("plain", 1088),
        ("int8", 100),
        ("int8", 1088),
        ("int4_g64", 64),
        ("w8a8", 1088),
        ("fp8", 64),
    ],
)
def test_one_call_gives_the_bits_of_several(fmt: str, inputs: int, dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(1)
    linear = CpuLinear(weight(fmt, inputs, dtype))
    factors, bias = torch.randn(inputs, generator=source), torch.randn(OUTPUTS, generator=source).to(dtype)
    norm = struct("KvqNorm")(factors.data_ptr(), 1e-5, DTYPES[factors.dtype])
    normed = {"norm": ctypes.addressof(norm)}
    gates = {"gated": 1, "activation": Activation.SILU}
    for rows in (1, 37, 407):
        x = torch.randn(rows, 2 * inputs, generator=source).to(dtype)
        own = torch.randn(rows, 2 * OUTPUTS, generator=source).to(dtype)[:, :OUTPUTS]
        one = linear(rms_norm(x[:, :inputs].contiguous(), factors, 1e-5))
        other = linear(gated(x, Activation.SILU))
        out = torch.full((rows, OUTPUTS), torch.nan, dtype=dtype)
        added, added_row = rows_of(own)
        after = {"added": added, "added_row": added_row}
        assert torch.equal(around(linear, x, out=out, **normed), one), rows
        assert torch.equal(around(linear, x, out=out, **normed, bias=bias.data_ptr()), one + bias), rows
        assert torch.equal(around(linear, x, out=out, **gates, **after), other + own), rows
        assert torch.equal(
            around(linear, x, out=out, **gates, **after, bias=bias.data_ptr()), other + bias + own
        ), rows


def test_a_product_of_no_inputs_is_what_is_added() -> None:
    linear = CpuLinear(PlainWeight(values=torch.empty(OUTPUTS, 0)))
    bias, out = torch.randn(OUTPUTS), torch.full((5, OUTPUTS), torch.nan)
    assert torch.equal(around(linear, torch.empty(5, 0), out=out, bias=bias.data_ptr()), bias.expand(5, -1))
