"""`merge_partials` in Triton: one program per token and head."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def merge_partials(outs: Tensor, lses: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Do what the reference does; see reference.py."""
    outs, lses = outs.contiguous(), lses.contiguous()
    out = torch.empty(outs.shape[1:], device=outs.device, dtype=torch.float32)
    lse = torch.empty(lses.shape[1:], device=outs.device, dtype=torch.float32)
    merge_into((out, lse), outs, lses, sinks)
    return out, lse


def merge_into(
    results: tuple[Tensor, Tensor], outs: Tensor, lses: Tensor, sinks: Tensor | None = None
) -> None:
    """Merge contiguous parts into the tensors `results`, which are contiguous and fp32.

    These may share memory with a part: a program reads its row of all parts before it writes the result.
    """
    parts, tokens, heads, dim = outs.shape
    if tokens:
        sizes = {"HEADS": heads, "DIM": dim, "PAD": triton.next_power_of_2(dim), "SINKS": sinks is not None}
        read = outs, lses, lses if sinks is None else sinks
        _merge_kernel[(tokens, heads)](*read, *results, tokens * heads, parts, **sizes, num_warps=1)


@triton.jit(do_not_specialize=["part_rows", "parts"])
def _merge_kernel(
    outs_ptr, lses_ptr, sinks_ptr, out_ptr, lse_ptr, part_rows, parts,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * HEADS + head
    col = tl.arange(0, PAD)
    top = float("-inf")
    total = 0.0
    if SINKS:
        top = tl.load(sinks_ptr + head).to(tl.float32)
        total = tl.where(top == float("-inf"), 0.0, 1.0)
    merged = tl.zeros((PAD,), tl.float32)
    at = row
    for _ in range(0, parts):
        part_lse = tl.load(lses_ptr + at)
        part = tl.load(outs_ptr + at * DIM + col, mask=col < DIM, other=0.0).to(tl.float32)
        higher = tl.maximum(top, part_lse)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        decay, weight = tl.exp(top - safe), tl.exp(part_lse - safe)
        total = total * decay + weight
        # An empty part may contain anything.
        merged = merged * decay + tl.where(weight == 0, 0.0, part) * weight
        top = higher
        at += part_rows
    seen = total != 0
    safe_total = tl.where(seen, total, 1.0)
    tl.store(out_ptr + row * DIM + col, merged / safe_total, mask=col < DIM)
    tl.store(lse_ptr + row, tl.where(seen, top + tl.log(safe_total), float("-inf")))
