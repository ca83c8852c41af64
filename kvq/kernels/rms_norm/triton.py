"""`add_norm` in Triton: one program per row, which keeps the row in registers from the sum to the norm."""

from collections.abc import Hashable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq.kernels.gpu.launch import Bound
from kvq.kernels.gpu.rows import rounded
from kvq.kernels.rms_norm.reference import NormWeight, check_add_norm

_ELEMENTS = 8  # of one thread: 16 bytes of bf16
_MOST_WARPS = 32


class AddNorm:
    """`add_norm` of the reference with fixed weights, on the current device."""

    def __init__(
        self, norm: NormWeight | None, *, post: NormWeight | None = None, scale: float = 1.0
    ) -> None:
        self._norm = norm
        self._post = post
        self._scale = float(scale)
        self._launches: dict[Hashable, Bound] = {}

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Add x [rows, dim] to the residual in place, and normalize the sum, as the reference does."""
        norm, post = self._norm, self._post
        if not x.is_contiguous():
            x = x.contiguous()
        rows, dim = x.shape
        launch = self._launches.get((dim, x.dtype, residual is None))
        if launch is None:  # checked once: all steps are of the same model
            check_add_norm(x, residual, norm, post)
            launch = self._bound(dim, adds=residual is not None)
            self._launches[dim, x.dtype, residual is None] = launch
        added = x if residual is None else residual  # a pointer that is not read, like the weights below
        out = added if norm is None else torch.empty_like(x)
        before = x if post is None else post.weight
        after = x if norm is None else norm.weight
        if rows:
            launch((rows, 1, 1), (x, added, before, after, out), (dim, added.stride(0)))
        return out

    def _bound(self, dim: int, *, adds: bool) -> Bound:
        pad, norm, post = triton.next_power_of_2(dim), self._norm, self._post
        tensors = "x_ptr", "residual_ptr", "post_ptr", "norm_ptr", "out_ptr"
        post_eps, eps = (0.0 if x is None else x.eps for x in (post, norm))
        numbers = {"post_eps": post_eps, "eps": eps, "scale": self._scale, "DIM": dim, "PAD": pad}
        flags = {"POST": post is not None, "ADDS": adds, "NORMS": norm is not None}
        warps = min(max(1, pad // (32 * _ELEMENTS)), _MOST_WARPS)
        fixed = {**numbers, **flags, "num_warps": warps}
        return Bound(_add_norm_kernel, tensors, ("x_row", "residual_row"), fixed)


@triton.jit
def _normed(y, weight, eps, DIM: tl.constexpr):
    """Divide a row, fp32 [columns], zero past its end, by its root mean square; multiply by the weight."""
    return y * tl.rsqrt(tl.sum(y * y, axis=0) / DIM + eps) * weight


@triton.jit
def _add_norm_kernel(
    x_ptr, residual_ptr, post_ptr, norm_ptr, out_ptr, x_row, residual_row, post_eps, eps, scale,
    DIM: tl.constexpr, PAD: tl.constexpr, POST: tl.constexpr, ADDS: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """Add and normalize. Grid: rows. All loads come first, so that they are in flight together."""
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
