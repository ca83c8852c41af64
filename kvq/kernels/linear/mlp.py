"""A gated MLP over quantized weights in one C++ call on CPUs."""

from enum import IntEnum

import torch
from torch import Tensor

from kvq.errors import ConfigError
from kvq.kernels.linear.cpu import CpuLinear, checked_rows, rows_of
from kvq.kernels.native.library import run
from kvq.kernels.native.structs import DTYPES


class Activation(IntEnum):
    """What is applied to the gates; KvqActivation."""

    SILU = 0  # x * sigmoid(x)
    GELU_TANH = 1  # GELU by its approximation with tanh


def gated(x: Tensor, activation: Activation) -> Tensor:
    """activation(gates) * rest, in fp32: [rows, 2 n], gates first -> [rows, n] of x's dtype."""
    if x.dim() != 2 or x.shape[1] % 2:
        raise ConfigError(f"gates and what they gate must be [rows, 2 n], got {list(x.shape)}")
    x = checked_rows(x, x.shape[1])
    out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype)
    sizes = out.shape[1], DTYPES[x.dtype], activation, len(x), torch.get_num_threads()
    run("gated", *rows_of(x), *rows_of(out), *sizes)
    return out


class CpuMLP:
    """y = down(activation(gate(x)) * up(x)), with the bits that the three calls give one after the other."""

    def __init__(self, gate_up: CpuLinear, down: CpuLinear, activation: Activation) -> None:
        """`gate_up`: gate and up joined, in this order.

        Raises:
            ConfigError: `down` does not take what the two others give.
        """
        if gate_up.out_features != 2 * down.in_features:
            raise ConfigError(
                f"gate and up give {gate_up.out_features} outputs together, "
                f"but down takes {down.in_features} inputs; it must be half as many"
            )
        self._gate_up, self._down, self.activation = gate_up, down, activation
        self.nbytes = gate_up.nbytes + down.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out] of x's dtype."""
        x = checked_rows(x, self._gate_up.in_features)
        out = torch.empty(x.shape[0], self._down.out_features, dtype=x.dtype)
        sizes = DTYPES[x.dtype], self.activation, len(x), torch.get_num_threads()
        run("linear_mlp", self._gate_up.struct, self._down.struct, *rows_of(x), *rows_of(out), *sizes)
        return out
