"""`rope` in C++ for CPUs: one call instead of torch's fourteen."""

import torch
from torch import Tensor

from kvq.errors import ConfigError
from kvq.kernels.native.abi import DTYPES
from kvq.kernels.native.library import run

MOST_DIM = 1024  # elements of a head that rope.cpp has room for


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Do what the reference does; a row's result is bit-identical regardless of the other rows.

    x: [rows, heads, dim], fp32, bf16 or fp16, with adjacent heads, changed in place; cos, sin: [rows, dim].

    Raises:
        ConfigError: the shape or dtype is not supported: compiled code would read past its end.
    """
    rows, heads, dim = x.shape
    fits = x.stride(2) == 1 and (heads == 1 or x.stride(1) == dim) and dim % 2 == 0 and dim <= MOST_DIM
    angles = cos.shape == sin.shape == (rows, dim) and cos.dtype == sin.dtype == x.dtype
    if not fits or not angles or x.dtype not in DTYPES:
        raise ConfigError(
            f"rope takes [rows, heads, dim], heads side by side, dim even and at most {MOST_DIM}, and "
            f"angles [rows, dim], got {x.dtype} {list(x.shape)} and {cos.dtype} {list(cos.shape)}"
        )
    cos, sin = cos.contiguous(), sin.contiguous()
    sizes = heads, dim // 2, DTYPES[x.dtype], rows, torch.get_num_threads()
    run("rope", x.data_ptr(), x.stride(0) * x.element_size(), cos.data_ptr(), sin.data_ptr(), *sizes)
