"""The kernel that merges the parts of a tile's keys by their log-sum-exp."""

import triton
import triton.language as tl

from kvq.kernels.attend.triton_list import MERGE_WORDS
from kvq.kernels.attend.triton_results import LOG2_E, store_rows


@triton.jit(do_not_specialize=["height"])
def merge_kernel(
    parts_ptr, part_lses_ptr, out_ptr, lse_ptr, merged_ptr, sink_ptr, height,
    V_DIM: tl.constexpr, V_PAD: tl.constexpr, V_ROTATED: tl.constexpr, Q_HEADS: tl.constexpr,
    SHARE: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Merge ROWS rows of a tile, AT_ONCE parts at a time, in their order. Grid: (tiles, KV heads, rows)."""
    record = merged_ptr + tl.program_id(0) * MERGE_WORDS
    parts = tl.load(record)
    if parts == 0:
        return
    own = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    row = tl.load(record + 2) + own
    valid = row < tl.load(record + 4) * SHARE
    token = (tl.load(record + 3) + row // SHARE).to(tl.int64)
    head = tl.program_id(1) * SHARE + row % SHARE
    part = tl.arange(0, AT_ONCE)
    col = tl.arange(0, V_PAD)
    step = tl.num_programs(1).to(tl.int64) * height
    first = tl.load(record + 1) * step + tl.program_id(1) * height
    lse_at = first + part[:, None] * step + own[None, :]
    at = lse_at[:, :, None] * V_PAD + col[None, None, :]
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, V_PAD), tl.float32)
    for done in range(0, parts, AT_ONCE):
        there = (done + part < parts)[:, None] & valid[None, :]
        lse = tl.load(part_lses_ptr + lse_at, mask=there, other=float("-inf")) * LOG2_E
        x = tl.load(parts_ptr + at, mask=there[:, :, None], other=0.0)
        lse_at += AT_ONCE * step
        at += AT_ONCE * step * V_PAD
        higher = tl.maximum(top, tl.max(lse, axis=0))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        decay, weight = tl.exp2(top - safe), tl.exp2(lse - safe[None, :])
        total = total * decay + tl.sum(weight, axis=0)
        out = out * decay[:, None] + tl.sum(x * weight[:, :, None], axis=0)
        top = higher
    out_at = token * Q_HEADS + head
    store_rows(
        out, top, total, out_ptr, lse_ptr, out_at * V_DIM, out_at, sink_ptr, head, valid,
        ROWS, V_DIM, V_PAD, V_ROTATED, SINKS,
    )  # fmt: skip
