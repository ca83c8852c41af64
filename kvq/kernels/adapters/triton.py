"""`adapters` in Triton: one program for each row's h = scale * x A^T, then for parts of its outputs."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from kvq.kernels.adapters.reference import Factors, check_rows
from kvq.kernels.gpu.rows import rounded

_WIDTH = 128  # inputs or outputs of one program at a time
_LEAST_RANK = 16


class StackedFactors:
    """Factors of several adapters for one weight, padded to one rank and stacked."""

    def __init__(self, factors: Sequence[Factors | None]) -> None:
        """`factors`: of each adapter; None for those that leave the weight as it is, but not for all."""
        known = [one for one in factors if one is not None]
        self.rank = max(_LEAST_RANK, *(triton.next_power_of_2(len(one.a)) for one in known))
        a, b = known[0].a, known[0].b
        self.a = a.new_zeros(len(factors), self.rank, a.shape[1], dtype=torch.float32)
        self.b = b.new_zeros(len(factors), len(b), self.rank, dtype=torch.float32)
        for i, one in enumerate(factors):
            if one is not None:
                more = self.rank - len(one.a)
                self.a[i] = functional.pad(one.scale * one.a.float(), (0, 0, 0, more))
                self.b[i] = functional.pad(one.b.float(), (0, more))


def adapters(out: Tensor, x: Tensor, factors: StackedFactors, chosen: Tensor) -> None:
    """Do what the reference does, on the current device; see reference.py. `out` must be contiguous."""
    check_rows(out, x, chosen)
    (rows, inputs), outputs, x = x.shape, out.shape[1], x.contiguous()
    if not rows:
        return
    h = torch.empty(rows, factors.rank, dtype=torch.float32, device=x.device)
    sizes = {"RANK": factors.rank, "WIDTH": _WIDTH, "num_warps": 4}
    _shrink_kernel[(rows,)](x, factors.a, h, chosen, inputs, **sizes)
    _expand_kernel[(rows, -(-outputs // _WIDTH))](out, factors.b, h, chosen, outputs, **sizes)


@triton.jit
def _shrink_kernel(x_ptr, a_ptr, h_ptr, chosen_ptr, inputs, RANK: tl.constexpr, WIDTH: tl.constexpr):
    """Compute a row's h, [RANK]. `a`: [adapters, RANK, inputs], scaled. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    own = tl.load(chosen_ptr + row).to(tl.int64)
    if own >= 0:
        rank = tl.arange(0, RANK)
        h = tl.zeros([RANK], tl.float32)
        for first in range(0, inputs, WIDTH):
            col = first + tl.arange(0, WIDTH)
            x = tl.load(x_ptr + row * inputs + col, mask=col < inputs, other=0.0).to(tl.float32)
            at = a_ptr + (own * RANK + rank[:, None]) * inputs + col[None, :]
            a = tl.load(at, mask=col[None, :] < inputs, other=0.0)  # [RANK, WIDTH]
            h += tl.sum(a * x[None, :], axis=1)
        tl.store(h_ptr + row * RANK + rank, h)


@triton.jit
def _expand_kernel(out_ptr, b_ptr, h_ptr, chosen_ptr, outputs, RANK: tl.constexpr, WIDTH: tl.constexpr):
    """Add a row's update to some outputs. `b`: [adapters, outputs, RANK]. Grid: (rows, parts of outputs)."""
    row = tl.program_id(0).to(tl.int64)
    own = tl.load(chosen_ptr + row).to(tl.int64)
    if own >= 0:
        rank = tl.arange(0, RANK)
        col = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        inside = col < outputs
        h = tl.load(h_ptr + row * RANK + rank)
        at = b_ptr + (own * outputs + col[:, None]) * RANK + rank[None, :]
        b = tl.load(at, mask=inside[:, None], other=0.0)  # [WIDTH, RANK]
        place = out_ptr + row * outputs + col
        OUT: tl.constexpr = out_ptr.dtype.element_ty
        y = tl.load(place, mask=inside, other=0.0).to(tl.float32) + tl.sum(b * h[None, :], axis=1)
        tl.store(place, rounded(y, OUT).to(OUT), mask=inside)
