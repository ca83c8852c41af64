"""Operators for Linear layers: over a weight's own tensors, or over one that a kernel has packed already."""

from collections.abc import Callable
from itertools import count
from secrets import randbits
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor
from torch.library import custom_op
from torch.utils.weak import WeakTensorKeyDictionary

from kvq.errors import ModelError
from kvq.formats.weights import parse_weight_format
from kvq.kernels.linear.weight import QuantizedWeight
from kvq.kernels.registry import select
from kvq.kernels.spec import Device, LinearSpec

_kept: WeakValueDictionary[int, Callable[[Tensor], Tensor]] = WeakValueDictionary()
_numbers = count(randbits(62))  # so that a program saved by another process names none of them
_packed: Any = WeakTensorKeyDictionary()  # codes -> (what it was packed for, kernel)


def keep(kernel: Callable[[Tensor], Tensor]) -> int:
    """A number by which `packed_linear` finds a kernel for as long as somebody holds it."""
    number = next(_numbers)
    _kept[number] = kernel
    return number


@custom_op("kvq::packed_linear", mutates_args=())
def packed_linear(x: Tensor, kernel: int, out_features: int) -> Tensor:
    """[rows, in] -> [rows, out_features] by the kernel that `keep` gave this number.

    Raises:
        ModelError: the layer that held the kernel is gone, or lives in another process.
    """
    run = _kept.get(kernel)
    if run is None:
        raise ModelError(
            "this program multiplies by the weight of a layer that is gone: keep the model that was compiled "
            "or exported, in the same process"
        )
    return run(x)


@packed_linear.register_fake
def _(x: Tensor, kernel: int, out_features: int) -> Tensor:
    return x.new_empty(x.shape[0], out_features)


@custom_op("kvq::linear", mutates_args=())
def linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    order: Tensor | None,
    fmt: str,
    backend: str = "auto",
) -> Tensor:
    """[rows, in] -> [rows, out] by the tensors of a `QuantizedWeight` of format `fmt`.

    The first call packs the weight, and what is packed lives as long as `codes` does.
    """
    name = fmt, backend, x.device, codes._version
    if codes not in _packed or _packed[codes][0] != name:
        weight = QuantizedWeight(
            fmt=parse_weight_format(fmt), codes=codes, scale=scale, zero=zero, order=order
        )
        _packed[codes] = name, _kernel(weight, backend)
    run: Callable[[Tensor], Tensor] = _packed[codes][1]
    return run(x)


@linear.register_fake
def _(x: Tensor, codes: Tensor, *_: Any, **__: Any) -> Tensor:
    return x.new_empty(x.shape[0], codes.shape[0])


def _kernel(weight: QuantizedWeight, backend: str) -> Callable[[Tensor], Tensor]:
    spec = LinearSpec(fmt=weight.fmt, in_features=weight.in_features, out_features=weight.out_features)
    kernel: Callable[[Tensor], Tensor] = select(
        spec.operation, spec, Device.of(weight.codes.device), backend
    ).run(weight)
    return kernel
