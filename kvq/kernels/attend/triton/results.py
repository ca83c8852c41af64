"""Results of a tile in Triton attention: row offsets, storage, and the kernel that merges the parts of a
tile's keys by their log-sum-exp.
"""

import triton
import triton.language as tl

from kvq.kernels.attend.triton.list_kernel import MERGE_WORDS
from kvq.kernels.gpu.rows import rotated, takes_ptx

LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def logarithm(x):
    """Return log2 of nonnegative numbers, in one instruction where the GPU has one; tl.log2 takes thirty."""
    if takes_ptx():
        y = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = tl.log2(x)
    return y


@triton.jit
def store_rows(
    out, top, total, out_ptr, lse_ptr, out_at, lse_at, sink_ptr, head, valid,
    ROWS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, ROTATED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Add the sink, divide, undo V's rotation, and store the rows; `top` is a power-of-two exponent."""
    if SINKS:
        sink = tl.load(sink_ptr + head, mask=valid, other=float("-inf")).to(tl.float32) * LOG2_E
        higher = tl.maximum(top, sink)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        decay = tl.exp2(top - safe)
        total = total * decay + tl.exp2(sink - safe)
        out = out * decay[:, None]
        top = higher
    seen = total != 0  # NaN stays NaN
    out = tl.where(seen[:, None], out * (1.0 / tl.where(seen, total, 1.0))[:, None], 0.0)
    lse = tl.where(seen, (top + logarithm(tl.where(seen, total, 1.0))) * _LN_2, float("-inf"))
    if ROTATED > 1:
        out = rotated(out, ROWS, PAD, ROTATED)
    col = tl.arange(0, PAD)
    mask = valid[:, None] & (col < DIM)[None, :]
    tl.store(out_ptr + out_at[:, None] + col[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + lse_at, lse, mask=valid)


@triton.jit
def tile_rows(item, own, kv_head, SHARE: tl.constexpr):
    """Return, for each row of an item, whether it exists, and its position, token and query head."""
    row = tl.load(item + 1, volatile=True) + own
    new = tl.load(item + 3, volatile=True)
    position = tl.load(item + 4, volatile=True) - new + row // SHARE
    token = (tl.load(item + 2, volatile=True) + row // SHARE).to(tl.int64)
    return row < new * SHARE, position, token, kv_head * SHARE + row % SHARE


@triton.jit
def store_results(  # D123: inverses: units are powers of two
    out, top, total, out_ptr, lse_ptr, parts_ptr, part_lses_ptr, item, kv_head, height, sink_ptr,
    ROWS: tl.constexpr, KV_HEADS: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    ROTATED: tl.constexpr, SINKS: tl.constexpr, is_plain=None,
):  # fmt: skip
    """Store an item's final results, or its partial results, which are merged with those of other items.
    `is_plain`: whether they are not rotated, stored after each log-sum-exp; None if all are alike.

    Row positions are recomputed here, so the loop over keys needs no registers for them.
    """
    own = tl.arange(0, ROWS)
    valid, _, token, head = tile_rows(item, own, kv_head, SHARE)
    part = tl.load(item + 7)
    if part < 0:
        row_at = token * (KV_HEADS * SHARE) + head
        store_rows(
            out, top, total, out_ptr, lse_ptr, row_at * DIM, row_at, sink_ptr, head, valid,
            ROWS, DIM, PAD, ROTATED, SINKS,
        )  # fmt: skip
    else:
        part_at = (part.to(tl.int64) * KV_HEADS + kv_head) * height + own
        lse_at = part_at if is_plain is None else 2 * part_at
        store_rows(
            out, top, total, parts_ptr, part_lses_ptr, part_at * PAD, lse_at, sink_ptr, head, valid,
            ROWS, PAD, PAD, 1, False,
        )  # fmt: skip
        if is_plain is not None:
            tl.store(part_lses_ptr + (lse_at + 1), is_plain.to(tl.float32) + part_at * 0, mask=valid)


@triton.jit(do_not_specialize=["height"])
def merge_kernel(
    parts_ptr, part_lses_ptr, out_ptr, lse_ptr, merged_ptr, sink_ptr, height,
    V_DIM: tl.constexpr, V_PAD: tl.constexpr, V_ROTATED: tl.constexpr, Q_HEADS: tl.constexpr,
    SHARE: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, SINKS: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """Merge ROWS rows of a tile, AT_ONCE parts at a time, in order. Grid: (tiles, KV heads, rows).
    MIXED: only some parts are rotated, as numbers after their log-sum-exps say."""
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
    plain = out
    for done in range(0, parts, AT_ONCE):
        there = (done + part < parts)[:, None] & valid[None, :]
        lses = part_lses_ptr + lse_at * (2 if MIXED else 1)
        lse = tl.load(lses, mask=there, other=float("-inf")) * LOG2_E
        x = tl.load(parts_ptr + at, mask=there[:, :, None], other=0.0)
        lse_at += AT_ONCE * step
        at += AT_ONCE * step * V_PAD
        higher = tl.maximum(top, tl.max(lse, axis=0))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        decay, weight = tl.exp2(top - safe), tl.exp2(lse - safe[None, :])
        total = total * decay + tl.sum(weight, axis=0)
        if MIXED:
            of_plain = weight * tl.load(lses + 1, mask=there, other=0.0)
            weight -= of_plain
            plain = plain * decay[:, None] + tl.sum(x * of_plain[:, :, None], axis=0)
        out = out * decay[:, None] + tl.sum(x * weight[:, :, None], axis=0)
        top = higher
    if MIXED:
        out = rotated(out, ROWS, V_PAD, V_ROTATED) + plain
    out_at = token * Q_HEADS + head
    store_rows(
        out, top, total, out_ptr, lse_ptr, out_at * V_DIM, out_at, sink_ptr, head, valid,
        ROWS, V_DIM, V_PAD, 1 if MIXED else V_ROTATED, SINKS,
    )  # fmt: skip
