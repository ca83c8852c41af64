"""`write_kv` in Triton: one launch quantizes, rotates and scatters K and V of all heads."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq.kernels.gpu.encode import finite_rows, write_token
from kvq.kernels.gpu.launch import opened, written_argument
from kvq.kernels.gpu.rows import INTERPRETED
from kvq.kernels.paged import PagedKV


def write_kv(k: Tensor, v: Tensor, kv: PagedKV, slots: Tensor) -> Tensor:
    """Do what the reference does, byte for byte; see reference.py. Slots are not checked."""
    tokens, heads = k.shape[:2]
    bad = torch.empty(tokens, dtype=torch.bool, device=k.device)
    if not tokens:
        return bad
    rows = written_argument("k", kv), written_argument("v", kv)
    sizes = {"BLOCK_SIZE": kv.block_size, "HEADS": heads, "HEADS_PAD": triton.next_power_of_2(heads)}
    # Not fused: a product and a sum rounded once would change codes.
    options = {"num_warps": 4, "enable_fp_fusion": False}
    _write_kernel[(tokens,)](
        k, v, slots, bad.view(torch.int8), *k.stride(), *v.stride(), *rows, **sizes, **options
    )
    return bad


@triton.jit
def _write(x_ptr, x_head, x_dim, rows, block, offset, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr):
    """Store all heads of a token's K or V; return 1 if any value was not finite."""
    head, col = tl.arange(0, HEADS_PAD), tl.arange(0, rows.pad)
    inside = head < HEADS
    at = head.to(tl.int64)[:, None] * x_head + col[None, :] * x_dim
    mask = inside[:, None] & (col < rows.dim)[None, :]
    x, is_bad = finite_rows(tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32))
    write_token(x, rows, block, offset, head, col, inside, HEADS_PAD)
    return is_bad


@triton.jit
def _write_kernel(
    k_ptr, v_ptr, slots_ptr, bad_ptr, k_token, k_head, k_dim, v_token, v_head, v_dim, k_rows, v_rows,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr,
):  # fmt: skip
    """Store one token's K and V. Grid: tokens. A token with a slot below 0 is padding."""
    if INTERPRETED:
        k_rows, v_rows = opened(k_rows), opened(v_rows)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        tl.store(bad_ptr + token, 0)
        return
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    k_bad = _write(k_ptr + token * k_token, k_head, k_dim, k_rows, block, offset, HEADS, HEADS_PAD)
    v_bad = _write(v_ptr + token * v_token, v_head, v_dim, v_rows, block, offset, HEADS, HEADS_PAD)
    tl.store(bad_ptr + token, (k_bad | v_bad).to(tl.int8))
