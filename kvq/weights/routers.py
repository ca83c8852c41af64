"""Expert routers: the modules' own code with batch-invariant matrix products."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvq.kernels import PlainWeight
from kvq.kernels.linear.cpu import CpuLinear
from kvq.weights.experts import PackedExperts
from kvq.weights.linear import ROUTERS, runs_library_code

_WHOLE = 64  # values: torch processes vectors of 4 to 16, two or four at a time
_CONVERSIONS = (Tensor.float, Tensor.type, Tensor.to)


class _RouterWeight(nn.Parameter):  # D172: a weight that computes its own products
    """An fp32 weight [out, in] for which a kernel computes `functional.linear`."""

    kernel: CpuLinear

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is functional.linear and len(args) > 1 and type(args[1]) is cls and not given:
            return _product(*args)
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **given)
        if func in _CONVERSIONS and isinstance(found, Tensor) and found.data_ptr() == args[0].data_ptr():
            return args[0]  # the caller requested fp32, which it is already; the product follows
        return found


def _product(x: Tensor, weight: _RouterWeight, bias: Tensor | None = None) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        found = weight.kernel(x.reshape(-1, x.shape[-1]))
        found = _apart(found if bias is None else found + bias)
        return found.view(*x.shape[:-1], found.shape[1])


def _apart(x: Tensor) -> Tensor:  # D173: separate rows: the sigmoid of a vector's remainder differs
    """Return `x` [rows, n] with a gap between its rows, unless rows fill entire vectors."""
    if x.shape[1] % _WHOLE == 0:
        return x
    return x.new_empty(x.shape[0], x.shape[1] + 1)[:, :-1].copy_(x)


def is_batch_invariant(linear: nn.Linear) -> bool:
    """Return True if a Linear layer is a router whose product was replaced."""
    return isinstance(linear.weight, _RouterWeight)


def batch_invariant_routers(model: nn.Module) -> None:
    """Replace the matrix products in routers of packed experts with batch-invariant ones."""
    for block in list(model.modules()):
        if not any(isinstance(child, PackedExperts) for child in block.children()):
            continue
        own = dict(block.named_children())
        inside = {name: x for child in own.values() for name, x in child.named_children() if name in ROUTERS}
        for name, router in (own | inside).items():
            weight = router._parameters.get("weight")
            if isinstance(router, nn.Linear) and (name not in ROUTERS or not runs_library_code(router)):
                continue
            if type(weight) is nn.Parameter and weight.dim() == 2:
                steady = _RouterWeight(weight.detach(), requires_grad=False)
                steady.kernel = CpuLinear(PlainWeight.narrowest(weight.detach()))
                router.weight = steady
