"""`gated` in Triton."""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq.kernels.gated.reference import Activation, check_gated
from kvq.kernels.gpu.launch import Bound
from kvq.kernels.gpu.rows import rounded

_WIDTH = 1024  # columns of one program, 8 of a thread: 16 bytes of bf16
_SILU, _GELU_TANH = tl.constexpr(Activation.SILU.value), tl.constexpr(Activation.GELU_TANH.value)


def gated(x: Tensor, activation: Activation) -> Tensor:
    """Do what the reference does, on the current device; see reference.py."""
    check_gated(x)
    if not x.is_contiguous():
        x = x.contiguous()
    rows, both = x.shape
    count = both // 2
    out = x.new_empty((rows, count))
    if rows and count:
        launch = _launch(x.device, x.dtype, activation)
        launch((rows, -(-count // _WIDTH), 1), (x, out), (both, count))
    return out


@lru_cache(maxsize=64)
def _launch(device: torch.device, dtype: torch.dtype, activation: Activation) -> Bound:
    sizes = {"ACTIVATION": int(activation), "WIDTH": _WIDTH, "num_warps": 4}
    return Bound(_gated_kernel, ("x_ptr", "out_ptr"), ("x_row", "count"), sizes)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == _SILU:
        y = x * tl.sigmoid(x)
    elif ACTIVATION == _GELU_TANH:  # (1 + tanh(z)) / 2 = sigmoid(2 z)
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        y = x * (0.5 + 0.5 * tl.erf(x * 0.7071067811865476))
    return y


@triton.jit
def _gated_kernel(x_ptr, out_ptr, x_row, count, ACTIVATION: tl.constexpr, WIDTH: tl.constexpr):
    """Apply the activation and multiply. Grid: (rows, parts of a row's columns)."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = col < count
    at = x_ptr + row * x_row + col
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    rest = tl.load(at + count, mask=inside, other=0.0).to(tl.float32)
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    y = rounded(_activated(gate, ACTIVATION) * rest, OUT)
    tl.store(out_ptr + row * count + col, y.to(OUT), mask=inside)
