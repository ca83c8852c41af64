"""`gated` in C++ for CPUs."""

import torch
from torch import Tensor

from kvq.kernels.gated.reference import Activation, check_activation, check_gated
from kvq.kernels.native.abi import DTYPES, checked_rows, rows_of
from kvq.kernels.native.library import run


def gated(x: Tensor, activation: Activation) -> Tensor:
    """Do what the reference does; see reference.py.

    Raises:
        ConfigError: the shape or dtype is not supported, or the activation has no C++ kernel.
    """
    check_activation(activation)
    check_gated(x)
    x = checked_rows(x, x.shape[1])
    out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype)
    sizes = out.shape[1], DTYPES[x.dtype], activation, len(x), torch.get_num_threads()
    run("gated", *rows_of(x), *rows_of(out), *sizes)
    return out
