"""Activation functions of the gates of an MLP."""

from enum import IntEnum

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
