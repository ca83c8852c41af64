"""Elementwise functions of torch whose results for an element don't depend on the size of its tensor.

Torch's vector code leaves the last few elements of each thread's share to scalar code, whose exponentials
round differently: silu(x)[i] may change its last bit if x gets longer (torch 2.13 on CPUs).
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_WHOLE = 64  # elements: torch's vector loops process 16 to 64 at a time
_SHARE = 1 << 14  # elements that one thread processes alone (gelu; others: twice as many); multiple of _WHOLE
_FUNCTIONS = {
    function
    for name in (
        *("__pow__", "__rpow__", "atanh", "celu", "cos", "cosh", "elu", "erf", "exp", "exp2", "expit"),
        *("expm1", "gelu", "hardswish", "log", "log1p", "logsigmoid", "mish", "pow", "rsqrt", "selu"),
        *("sigmoid", "silu", "sin", "sinh", "softplus", "sqrt", "tanh"),
    )
    for place in (functional, torch, torch.special, Tensor)
    if (function := getattr(place, name, None)) is not None
}


def invariant_functions() -> AbstractContextManager[object]:  # D395
    """Return a context in which elementwise functions process whole vectors only, in shares of one thread."""
    return _Invariant()


class _Invariant(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func not in _FUNCTIONS or "out" in given:
            return func(*args, **given)
        if given.pop("inplace", False):
            return args[0].copy_(self.__torch_function__(func, types, args, given))
        x, *others = args
        is_one = isinstance(x, Tensor) and not any(isinstance(other, Tensor) for other in others)
        if not is_one or not x.is_floating_point():
            return func(*args, **given)
        flat = x.reshape(-1)
        if len(flat) > _SHARE or len(flat) % _WHOLE or not x.is_contiguous():
            filled = functional.pad(flat, (0, -len(flat) % _WHOLE))
            parts = [func(part, *others, **given) for part in filled.split(_SHARE)]
            return torch.cat(parts)[: len(flat)].view(x.shape)
        return func(*args, **given)
