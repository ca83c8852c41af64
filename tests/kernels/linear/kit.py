"""Weights and inputs for the tests of Linear kernels, and what they should give."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvq.formats.weights import WeightCode, parse_weight_format
from kvq.kernels import QuantizedWeight
from kvq.kernels.codec import e4m3
from kvq.kernels.linear.reference import rounded_inputs
from kvq.weights.rounding import round_weight

FORMATS = (
    "int8", "int8_g32", "int8_g8_asym", "int8_asym", "int4", "int4_g64_asym", "int4_g192", "int3_g64", "fp8",
    "w8a8", "w4a8", "int8_g64_asym_a8", "fp8_a8",
)  # fmt: skip
# Also with every output's codes in one group, which int4 as a name has not.
PER_CHANNEL = ("int4_channel", "int3_channel_asym", "int4_channel_a8")


def weight_of(
    name: str, outputs: int, inputs: int, *, dtype: torch.dtype = torch.float32, ordered: bool = False
) -> QuantizedWeight:
    """A random weight with outliers in that format; `ordered`: with its columns shuffled."""
    source = torch.Generator().manual_seed(outputs * 1000 + inputs)
    w = torch.randn(outputs, inputs, generator=source)
    w[:, ::37] *= 8
    fmt = parse_weight_format(name)
    packed = round_weight(w, fmt, dtype=dtype)
    if not ordered:
        return packed
    order = torch.randperm(inputs, generator=source)
    return QuantizedWeight(fmt=fmt, codes=packed.codes, scale=packed.scale, zero=packed.zero, order=order)


def rows_of(rows: int, inputs: int, seed: int = 0) -> Tensor:
    """Random inputs with outliers; every fifth row is small, one is zero."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=source)
    x[:, ::31] *= 20
    x[::5] *= 1e-6
    x[3:4] = 0
    return x


def exact(weight: QuantizedWeight, x: Tensor) -> Tensor:
    """The product in fp64 of (q - zero) * scale, unrounded, with the inputs that the format rounds to."""
    is_fp8 = weight.fmt.code is WeightCode.FP8
    q = (e4m3.decode(weight.codes) if is_fp8 else weight.integers()).double()
    q = q.view(weight.out_features, weight.scale.shape[1], -1)
    if weight.zero is not None:
        q = q - weight.zero.double()[:, :, None]
    w = (q * weight.scale.double()[:, :, None]).flatten(1)
    inputs = rounded_inputs(x.float(), weight.fmt.inputs).double()
    return (inputs if weight.order is None else inputs[:, weight.order]) @ w.T


def error(got: Tensor, want: Tensor) -> float:
    """Largest difference relative to the largest value."""
    return float((got.double() - want).abs().max() / want.abs().max().clamp(min=1e-30))


def check_threads(kernel: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Fail if the number of threads changes a bit."""
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            found.append(kernel(x))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(y, found[0]) for y in found)


def check_surroundings(kernel: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Fail if anything but `x` is read, or its strides are not."""
    rows, inputs = x.shape
    kernel(torch.full((200, inputs), float("nan")))  # which scratch memory may still hold
    want = kernel(x)
    around = torch.full((rows + 2, inputs + 44), float("nan"))
    inner = around[1:-1, 7 : inputs + 7]
    inner.copy_(x)
    assert torch.equal(kernel(inner), want)
    assert torch.equal(kernel(x.T.contiguous().T), want)


def check_broken_row(kernel: Callable[[Tensor], Tensor], x: Tensor, bad: float) -> None:
    """Fail unless what is no finite number spoils all outputs of its row, and no other row."""
    want, row = kernel(x), len(x) // 2
    broken = x.clone()
    broken[row, 101] = bad
    got = kernel(broken)
    assert not torch.isfinite(got[row]).any()
    others = [i for i in range(len(x)) if i != row]
    assert torch.equal(got[others], want[others])
    assert not torch.isfinite(kernel(broken[row : row + 1])).any()
