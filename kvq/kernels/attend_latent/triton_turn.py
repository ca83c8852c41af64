"""Rotating what is not in blocks: queries before attention over latents, and its results behind it.

In the attention kernel a row of 512 would be rotated by every program again, and its layout would cost the
loop some 30 instructions a key (counted).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq.kernels.gpu.launch import launch
from kvq.kernels.gpu.rows import rotate, rounded


def turned(x: Tensor, parts: tuple[tuple[int, int], ...], dtype: torch.dtype) -> Tensor:
    """Rows [tokens, heads, dim] with parts of neighbouring columns rotated in blocks, in another dtype.

    `parts`: one or two times columns, of which a power of two, and the size of a block, 1 for none.
    """
    tokens, heads, _ = x.shape
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    (first, first_block), (second, second_block) = (*parts, (0, 1))[:2]
    if tokens:
        launch(
            turn_kernel,
            (tokens * heads, 1, 1),
            (x, out),
            (*x.stride(), heads),
            {
                "FIRST": first,
                "FIRST_PAD": triton.next_power_of_2(first),
                "FIRST_BLOCK": first_block,
                "SECOND": second,
                "SECOND_PAD": triton.next_power_of_2(second),
                "SECOND_BLOCK": second_block,
                "num_warps": 1,
            },
        )
    return out


@triton.jit(do_not_specialize=["heads"])
def turn_kernel(
    x_ptr, out_ptr, x_token, x_head, x_dim, heads,
    FIRST: tl.constexpr, FIRST_PAD: tl.constexpr, FIRST_BLOCK: tl.constexpr,
    SECOND: tl.constexpr, SECOND_PAD: tl.constexpr, SECOND_BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row // heads * x_token + row % heads * x_head
    out_ptr += row * (FIRST + SECOND)
    _turn(x_ptr, out_ptr, x_dim, FIRST, FIRST_PAD, FIRST_BLOCK)
    if SECOND > 0:
        _turn(x_ptr + FIRST * x_dim, out_ptr + FIRST, x_dim, SECOND, SECOND_PAD, SECOND_BLOCK)


@triton.jit
def _turn(x_ptr, out_ptr, stride, DIM: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr):
    col = tl.arange(0, PAD)
    x = tl.load(x_ptr + col * stride, mask=col < DIM, other=0.0).to(tl.float32)
    if BLOCK > 1:
        x = tl.reshape(rotate(tl.reshape(x, (1, PAD)), 1, PAD, BLOCK), (PAD,))
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out_ptr + col, rounded(x, DTYPE).to(DTYPE), mask=col < DIM)
