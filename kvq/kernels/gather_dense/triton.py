"""`gather_dense` in Triton: a tile of tokens is dequantized, rotated back if requested, and stored."""

import triton
import triton.language as tl
from torch import Tensor

from kvq.kernels.gpu.launch import kernel_rows, opened
from kvq.kernels.gpu.rows import INTERPRETED, rotate
from kvq.kernels.gpu.stored import mean_rows, stored_rows
from kvq.kernels.paged import PagedKV

_TOKENS = 32  # of one program
_INTERPRETED_TOKENS = 16


def gather_dense(
    kv: PagedKV,
    tables: Tensor,
    start: int,
    end: int,
    *,
    unrotate: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Do what the reference does, bit for bit; see reference.py. Tables are not checked."""
    out = kv.dense(len(tables), end - start) if out is None else out
    sequences, kv_heads, length, _ = out[0].shape
    if not out[0].numel():
        return out
    tokens = _INTERPRETED_TOKENS if tables.device.type == "cpu" else _TOKENS
    for rows, into in zip((kernel_rows("k", kv), kernel_rows("v", kv)), out, strict=True):
        stored = (rows if unrotate else rows._replace(rotated=1)).argument()
        numbers = tables.stride(0), *into.stride()[:3], start, end
        options = {"num_warps": 4, "enable_fp_fusion": False}  # the same bits as the reference
        _gather_kernel[(triton.cdiv(length, tokens), kv_heads, sequences)](
            into, tables, stored, *numbers, BLOCK_SIZE=kv.block_size, TOKENS=tokens, **options
        )
    return out


@triton.jit(do_not_specialize=["table_stride", "start", "end"])  # they change from step to step
def _gather_kernel(
    out_ptr, tables_ptr, rows, table_stride, out_sequence, out_head, out_token, start, end,
    BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Store dequantized rows. Grid: (tiles of tokens, KV heads, sequences)."""
    if INTERPRETED:
        rows = opened(rows)
    codes, scales, means = rows.code_strides, rows.scale_strides, rows.mean_strides
    head, sequence = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    token = start + tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < end
    entry = tables_ptr + sequence * table_stride + token // BLOCK_SIZE
    block = tl.load(entry, mask=inside, other=0).to(tl.int64)
    slot = (token % BLOCK_SIZE).to(tl.int64)
    col = tl.arange(0, rows.pad)
    mask = inside[:, None] & (col < rows.dim)[None, :]
    codes_at = block * codes.block + head * codes.head + slot * codes.slot
    scales_at = block * scales.block + head * scales.head + slot * scales.slot
    x = stored_rows(rows, rows.codes, rows.scales, codes_at, scales_at, head, inside, col)
    if rows.mean_group > 0:
        means_at = block * means.block + head * means.head
        x += mean_rows(rows.means, means_at, inside, col, rows.dim, rows.mean_group)
    if rows.rotated > 1:
        x = rotate(x, TOKENS, rows.pad, rows.rotated)
    row = sequence * out_sequence + head * out_head + (token - start).to(tl.int64) * out_token
    tl.store(out_ptr + row[:, None] + col[None, :], x.to(out_ptr.dtype.element_ty), mask=mask)
