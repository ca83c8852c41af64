"""Reference `gated`: the definition of correct results."""

from collections.abc import Callable
from enum import IntEnum
from functools import partial

from torch import Tensor
from torch.nn import functional

from kvq.errors import ConfigError


class Activation(IntEnum):
    """Activation function of gates; the first members have the values of KvqActivation."""

    SILU = 0  # x * sigmoid(x)
    GELU_TANH = 1  # GELU by its approximation with tanh
    GELU = 2  # x * Phi(x), with the normal distribution function


COMPILED = (Activation.SILU, Activation.GELU_TANH)  # in C++


def check_activation(activation: Activation) -> None:
    """Raise ConfigError if the activation has no C++ kernel."""
    if activation not in COMPILED:
        known = ", ".join(x.name for x in COMPILED)
        raise ConfigError(f"{Activation(activation).name} has no C++ kernel, only {known}")


_FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: functional.silu,
    Activation.GELU_TANH: partial(functional.gelu, approximate="tanh"),
    Activation.GELU: functional.gelu,
}


def gated(x: Tensor, activation: Activation) -> Tensor:
    """Return activation(gates) * rest in x's dtype, rounded once: [rows, 2 n], gates first -> [rows, n]."""
    check_gated(x)
    gates, rest = x.float().chunk(2, 1)
    return (activate(gates, activation) * rest).to(x.dtype)


def activate(gates: Tensor, activation: Activation) -> Tensor:
    """Apply only the activation function."""
    return _FUNCTIONS[activation](gates)


def check_gated(x: Tensor) -> None:
    """Raise ConfigError unless the shape is [rows, 2 n]."""
    if x.dim() != 2 or x.shape[1] % 2:
        raise ConfigError(f"gates and what they gate must be [rows, 2 n], got {list(x.shape)}")
