"""The definition of correct for `gated`."""

from collections.abc import Callable
from enum import IntEnum
from functools import partial

from torch import Tensor
from torch.nn import functional

from kvq.errors import ConfigError


class Activation(IntEnum):
    """Activation function of gates; the first are KvqActivation."""

    SILU = 0  # x * sigmoid(x)
    GELU_TANH = 1  # GELU by its approximation with tanh
    GELU = 2  # x times the normal distribution up to x


COMPILED = (Activation.SILU, Activation.GELU_TANH)  # that C++ knows


def check_activation(activation: Activation) -> None:
    """Raise ConfigError for one that compiled code would take for another."""
    if activation not in COMPILED:
        known = ", ".join(x.name for x in COMPILED)
        raise ConfigError(f"{Activation(activation).name} has no C++ kernel, only {known}")


_FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: functional.silu,
    Activation.GELU_TANH: partial(functional.gelu, approximate="tanh"),
    Activation.GELU: functional.gelu,
}


def gated(x: Tensor, activation: Activation) -> Tensor:
    """activation(gates) * rest, in fp32, rounded once: [rows, 2 n], gates first -> [rows, n] of x's dtype."""
    check_gated(x)
    gates, rest = x.float().chunk(2, 1)
    return (activate(gates, activation) * rest).to(x.dtype)


def activate(gates: Tensor, activation: Activation) -> Tensor:
    """The activation alone."""
    return _FUNCTIONS[activation](gates)


def check_gated(x: Tensor) -> None:
    """Raise ConfigError for a shape that has no halves."""
    if x.dim() != 2 or x.shape[1] % 2:
        raise ConfigError(f"gates and what they gate must be [rows, 2 n], got {list(x.shape)}")
