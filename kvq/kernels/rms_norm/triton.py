"""`add_norm` in Triton: one program a row, which stays in registers from the sum to its norm."""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq.kernels.gpu.launch import Bound
from kvq.kernels.gpu.rows import rounded
from kvq.kernels.rms_norm.reference import check_add_norm
from kvq.kernels.rms_norm.weight import NormWeight

_ELEMENTS = 8  # of one thread: 16 bytes of bf16
_MOST_WARPS = 32


def add_norm(
    x: Tensor,
    residual: Tensor | None,
    norm: NormWeight | None,
    *,
    post: NormWeight | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Do what the reference does; see there. Runs on the current device."""
    check_add_norm(x, residual, norm, post)
    if x.stride(1) != 1:
        x = x.contiguous()
    added = x if residual is None else residual  # a pointer that is not read, as the weights below
    out = added if norm is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, dim = x.shape
    if not rows:
        return out
    before = x if post is None else post.weight
    after = x if norm is None else norm.weight
    launch = _launch(
        _Kind(
            *(x.device, x.dtype, added.dtype, before.dtype, after.dtype, dim),
            *(None if post is None else post.eps, None if norm is None else norm.eps),
            *(scale, residual is not None),
        )
    )
    launch((rows, 1, 1), (x, added, before, after, out), (x.stride(0), added.stride(0)))
    return out


class _Kind(NamedTuple):
    """Launches that run the same machine code."""

    device: torch.device
    dtype: torch.dtype
    added: torch.dtype
    before: torch.dtype  # of weights
    after: torch.dtype
    dim: int
    post_eps: float | None
    eps: float | None
    scale: float
    adds: bool


@lru_cache(maxsize=256)
def _launch(kind: _Kind) -> Bound:
    pad = triton.next_power_of_2(kind.dim)
    return Bound(
        _add_norm_kernel,
        ("x_ptr", "residual_ptr", "post_ptr", "norm_ptr", "out_ptr"),
        ("x_row", "residual_row"),
        post_eps=kind.post_eps or 0.0,
        eps=kind.eps or 0.0,
        scale=float(kind.scale),
        DIM=kind.dim,
        PAD=pad,
        POST=kind.post_eps is not None,
        ADDS=kind.adds,
        NORMS=kind.eps is not None,
        num_warps=min(max(1, pad // (32 * _ELEMENTS)), _MOST_WARPS),
    )


@triton.jit
def _normed(y, weight, eps, DIM: tl.constexpr):
    """A row fp32 [columns], zero past its end, over its root mean square, times its weight."""
    return y * tl.rsqrt(tl.sum(y * y, axis=0) / DIM + eps) * weight


@triton.jit
def _add_norm_kernel(
    x_ptr, residual_ptr, post_ptr, norm_ptr, out_ptr, x_row, residual_row, post_eps, eps, scale,
    DIM: tl.constexpr, PAD: tl.constexpr, POST: tl.constexpr, ADDS: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """Grid: rows. All loads come first, so that they are on their way together."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, PAD)
    inside = col < DIM
    y = tl.load(x_ptr + row * x_row + col, mask=inside, other=0.0).to(tl.float32)
    at = residual_ptr + row * residual_row + col
    if ADDS:
        residual = tl.load(at, mask=inside, other=0.0)
    if POST:
        post = tl.load(post_ptr + col, mask=inside, other=0.0)
    if NORMS:
        weight = tl.load(norm_ptr + col, mask=inside, other=0.0)
    if POST:
        y = _normed(y, post.to(tl.float32), post_eps, DIM)
    y = y * scale
    if ADDS:
        STORED: tl.constexpr = residual_ptr.dtype.element_ty
        y = rounded(residual.to(tl.float32) + y, STORED)
        tl.store(at, y.to(STORED), mask=inside)
    if NORMS:
        OUT: tl.constexpr = out_ptr.dtype.element_ty
        y = rounded(_normed(y, weight.to(tl.float32), eps, DIM), OUT)
        tl.store(out_ptr + row * DIM + col, y.to(OUT), mask=inside)
