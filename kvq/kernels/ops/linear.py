"""Operators for Linear layers, which take either a weight's tensors or a weight that a kernel has packed."""

from collections.abc import Callable
from itertools import count
from secrets import randbits
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.library import custom_op
from torch.utils.weak import WeakTensorKeyDictionary

from kvq.errors import ModelError
from kvq.formats.weights import parse_weight_format
from kvq.kernels.linear.reference import ReferenceLinear
from kvq.kernels.registry import select
from kvq.kernels.spec import Device, LinearSpec
from kvq.kernels.weight import QuantizedWeight

_kept: WeakValueDictionary[int, Callable[[Tensor], Tensor]] = WeakValueDictionary()
_numbers = count(randbits(62))  # random, so that a program saved by another process finds no kernel
_packed: Any = WeakTensorKeyDictionary()  # codes -> (what it was packed for, kernel)


def keep(kernel: Callable[[Tensor], Tensor]) -> int:
    """Return a number by which `packed_linear` finds the kernel as long as references to the kernel exist."""
    number = next(_numbers)
    _kept[number] = kernel
    return number


@custom_op("kvq::packed_linear", mutates_args=())
def packed_linear(x: Tensor, kernel: int, out_features: int) -> Tensor:  # D226
    """Multiply [rows, in] -> [rows, out_features] with the kernel to which `keep` assigned this number.

    Raises:
        ModelError: the layer with the kernel no longer exists, or is in another process.
    """
    return _found(kernel)(x)


def _found(number: int) -> Callable[[Tensor], Tensor]:
    kernel = _kept.get(number)
    if kernel is None:
        raise ModelError(
            "this program multiplies by the weight of a layer that is gone: keep the model that was compiled "
            "or exported, in the same process"
        )
    return kernel


@packed_linear.register_fake
def _(x: Tensor, kernel: int, out_features: int) -> Tensor:
    return x.new_empty(x.shape[0], out_features)


@custom_op("kvq::looked_up_rows", mutates_args=())
def looked_up_rows(rows: Tensor, kernel: int, in_features: int, dtype: torch.dtype) -> Tensor:
    """Look up int64 [...] -> [..., in_features] in `dtype`, in the weight of a kernel that `keep` registered.

    Raises:
        ModelError: as for `packed_linear`.
    """
    look_up: Callable[[Tensor, torch.dtype], Tensor] = _found(kernel).look_up  # type: ignore[attr-defined]
    return look_up(rows, dtype)


@looked_up_rows.register_fake
def _(rows: Tensor, kernel: int, in_features: int, dtype: torch.dtype) -> Tensor:
    return rows.new_empty(*rows.shape, in_features, dtype=dtype)


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
    """Multiply [rows, in] -> [rows, out] with the tensors of a `QuantizedWeight` in format `fmt`.

    The first call packs the weight. The packed weight is kept as long as `codes` exists; after a write to the
    codes or scales, the weight is packed again.
    """
    weight = QuantizedWeight(fmt=parse_weight_format(fmt), codes=codes, scale=scale, zero=zero, order=order)
    spec = LinearSpec(fmt=weight.fmt, in_features=weight.in_features, out_features=weight.out_features)
    chosen = select(spec.operation, spec, Device.of(codes.device), backend)
    if chosen.run is ReferenceLinear:  # packs nothing, and would keep its own key alive
        return ReferenceLinear(weight)(x)
    name = fmt, chosen.backend, _version(codes), scale.data_ptr(), _version(scale)
    if codes not in _packed or _packed[codes][0] != name:
        _packed[codes] = name, chosen.run(weight)
    run: Callable[[Tensor], Tensor] = _packed[codes][1]
    return run(x)


def _version(x: Tensor) -> int:
    """Return a tensor's number of writes; 0 if it was made in inference mode, which doesn't count them."""
    return 0 if x.is_inference() else x._version


@linear.register_fake
def _(x: Tensor, codes: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], codes.shape[0])
