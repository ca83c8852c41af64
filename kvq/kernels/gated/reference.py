"""The definition of correct for `gated`."""

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional

from kvq.errors import ConfigError
from kvq.kernels.gated.activation import Activation

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
