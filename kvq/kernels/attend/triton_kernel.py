"""The device code of `attend` in Triton: one kernel for decode and extend.

A program takes one tile of query rows (new token, query head of the KV head) of one sequence and one
KV head, and some or all of the keys, as the work list says. Codes are never scaled: the K scale and
minimum go to the scores, the V scale and minimum to the probabilities.

Source: Dao, "FlashAttention-2", 2023, section 3.1; Dao et al., "Flash-Decoding", 2023, for splits.
"""

import triton
import triton.language as tl

from kvq.kernels.attend.triton_int4 import add_int4_values, dot, int4_queries, int4_scores, joined
from kvq.kernels.attend.triton_list import ITEM_WORDS
from kvq.kernels.gpu.rows import (
    FLOAT,
    FP8,
    GROUPED,
    INT4,
    INT8,
    fp8_codes,
    grouped_rows,
    int8_codes,
    rotate,
)

LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _plain_codes(codes, at, mask, KIND: tl.constexpr, COMPUTE: tl.constexpr):
    """Codes of float, FP8 and INT8 formats as COMPUTE numbers, without their scale."""
    x = tl.load(codes + at, mask=mask, other=0)
    if KIND == FP8:
        values = fp8_codes(x, COMPUTE)
    elif KIND == INT8:
        values = int8_codes(x, COMPUTE, True)
    else:
        values = x.to(COMPUTE)
    return values


@triton.jit
def _row_scales(
    scales, static, block_at, slot, head, inside,
    SLOT: tl.constexpr, STATIC: tl.constexpr, PAIRED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """What codes of those tokens are multiplied by, fp32 [keys].

    PAIRED: `scales` are words of two neighbouring tokens, since only words are copied asynchronously.
    """
    if STATIC:
        scale = tl.where(inside, tl.load(static + head), 0.0)
    elif PAIRED:
        words = tl.load(scales + block_at + slot // 2, mask=inside, other=0)
        half = tl.where(slot % 2 == 0, words, words >> 16).to(tl.int16)
        scale = half.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        scale = tl.load(scales + block_at + slot * SLOT, mask=inside, other=0.0).to(tl.float32)
    return scale * UNIT


@triton.jit
def _scores(
    q, runs, codes, scales, static, codes_at, scales_at, block_at, slot, kv_head, inside, col,
    KIND: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, WIDTH: tl.constexpr,
    COMPUTE: tl.constexpr, UNIT: tl.constexpr, SLOT: tl.constexpr, STATIC: tl.constexpr,
    PAIRED: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """q . k of one tile, fp32 [rows, keys]; `runs`: the queries as int4 rows need them."""
    if KIND == INT4:
        scores = int4_scores(
            runs[0], runs[1], runs[2], runs[3], codes, scales, codes_at, scales_at, inside,
            DIM, GROUP, RUN, WIDTH, COMPUTE, UNIT,
        )  # fmt: skip
    elif KIND == GROUPED:
        k = grouped_rows(codes, scales, codes_at, scales_at, inside, col, DIM, GROUP, BITS)
        scores = dot(q, tl.trans(k.to(COMPUTE)))
    else:
        mask = inside[:, None] & (col < DIM)[None, :]
        k = _plain_codes(codes, codes_at[:, None] + col[None, :], mask, KIND, COMPUTE)
        scores = dot(q, tl.trans(k))
        if KIND != FLOAT:
            scale = _row_scales(scales, static, block_at, slot, kv_head, inside, SLOT, STATIC, PAIRED, UNIT)
            scores = scores * scale[None, :]
    return scores


@triton.jit
def _plain_values(
    out, p, decay, codes, scales, static, codes_at, scales_at, block_at, slot, kv_head, inside,
    KIND: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, GROUP: tl.constexpr, COMPUTE: tl.constexpr,
    UNIT: tl.constexpr, SLOT: tl.constexpr, STATIC: tl.constexpr, PAIRED: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """The output [rows, PAD] of all formats but int4 with one tile taken in."""
    col = tl.arange(0, PAD)
    mask = inside[:, None] & (col < DIM)[None, :]
    if KIND == GROUPED:
        v = grouped_rows(codes, scales, codes_at, scales_at, inside, col, DIM, GROUP, BITS).to(COMPUTE)
    else:
        v = _plain_codes(codes, codes_at[:, None] + col[None, :], mask, KIND, COMPUTE)
    if (KIND != FLOAT) and (KIND != GROUPED):
        scale = _row_scales(scales, static, block_at, slot, kv_head, inside, SLOT, STATIC, PAIRED, UNIT)
        p = p * scale[None, :]
    return out * decay[:, None] + dot(p.to(COMPUTE), v)


@triton.jit
def _capped_and_masked(
    scores, softcap, key, position, inside, window, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr
):
    """Scores as exponents of two, -inf where a query must not see a key."""
    if SOFTCAP:
        grown = tl.exp2(scores * (2.0 / softcap * LOG2_E))
        scores = (softcap * LOG2_E) * (1.0 - 2.0 / (grown + 1.0))
    visible = inside[None, :] & (key[None, :] <= position[:, None])
    if WINDOW:
        visible = visible & (key[None, :] > position[:, None] - window)
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def _read_queries(
    q_ptr, at, mask, ROWS: tl.constexpr, PAD: tl.constexpr, ROTATED: tl.constexpr, COMPUTE: tl.constexpr
):
    """Queries as COMPUTE numbers [ROWS, PAD], and what each row's scores are to be multiplied by.

    fp16 can't hold every bf16 number, so rows are divided by a power of two where it is needed.
    """
    x = tl.load(q_ptr + at, mask=mask, other=0.0)
    unit = tl.full((ROWS,), 1.0, tl.float32)
    narrow: tl.constexpr = (COMPUTE == tl.float16) and (q_ptr.dtype.element_ty != tl.float16)
    if (ROTATED > 1) or narrow:
        y = x.to(tl.float32)
        if ROTATED > 1:
            y = rotate(y, ROWS, PAD, ROTATED)
        if narrow:
            top = tl.max(tl.abs(y), axis=1)
            unit = tl.exp2(tl.ceil(tl.log2(tl.where(top > 0, top, 1.0))))
            y = y / unit[:, None]
        x = y.to(COMPUTE)
    return x.to(COMPUTE), unit


@triton.jit
def store_rows(
    out, top, total, out_ptr, lse_ptr, out_at, lse_at, sink_ptr, head, valid,
    ROWS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, ROTATED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Divide, let the sink join, undo V's rotation, and store; `top` counts in powers of two."""
    if SINKS:
        sink = tl.load(sink_ptr + head, mask=valid, other=float("-inf")).to(tl.float32) * LOG2_E
        higher = tl.maximum(top, sink)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        decay = tl.exp2(top - safe)
        total = total * decay + tl.exp2(sink - safe)
        out = out * decay[:, None]
        top = higher
    seen = total != 0  # NaN stays NaN
    out = tl.where(seen[:, None], out / tl.where(seen, total, 1.0)[:, None], 0.0)
    lse = tl.where(seen, (top + tl.log2(tl.where(seen, total, 1.0))) * _LN_2, float("-inf"))
    if ROTATED > 1:
        out = rotate(out, ROWS, PAD, ROTATED)
    col = tl.arange(0, PAD)
    mask = valid[:, None] & (col < DIM)[None, :]
    tl.store(out_ptr + out_at[:, None] + col[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + lse_at, lse, mask=valid)


# Numbers that change from step to step would else be compiled for: 1, multiples of 16, and others.
_VARYING = ["table_stride", "window", "height"]


@triton.jit(do_not_specialize=_VARYING)
def attend_kernel(
    q_ptr, out_ptr, lse_ptr, parts_ptr, part_lses_ptr, items_ptr, tables_ptr, sink_ptr,
    q_token, q_head, q_dim, table_stride, height,
    k_codes, k_scales, k_static, kc_block, kc_head, kc_slot: tl.constexpr,
    ks_block, ks_head, ks_slot: tl.constexpr,
    v_codes, v_scales, v_static, vc_block, vc_head, vc_slot: tl.constexpr,
    vs_block, vs_head, vs_slot: tl.constexpr,
    scale, softcap, window,
    K_KIND: tl.constexpr, K_BITS: tl.constexpr, K_DIM: tl.constexpr, K_PAD: tl.constexpr,
    K_GROUP: tl.constexpr, K_ROTATED: tl.constexpr, K_STATIC: tl.constexpr,
    K_PAIRED: tl.constexpr, K_UNIT: tl.constexpr,
    V_KIND: tl.constexpr, V_BITS: tl.constexpr, V_DIM: tl.constexpr, V_PAD: tl.constexpr,
    V_GROUP: tl.constexpr, V_ROTATED: tl.constexpr, V_STATIC: tl.constexpr,
    V_PAIRED: tl.constexpr, V_UNIT: tl.constexpr,
    K_RUN: tl.constexpr, K_WIDTH: tl.constexpr, K_COMPUTE: tl.constexpr,
    V_RUN: tl.constexpr, V_WIDTH: tl.constexpr, V_COMPUTE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, Q_HEADS: tl.constexpr, SHARE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Grid: items times KV heads, the heads of an item side by side. `SHARE`: query heads of one KV head.

    An item that is part of a tile's keys stores to `parts_ptr`, fp32 [parts, KV heads, height, V_PAD],
    still rotated, and to `part_lses_ptr`; one that is all of them stores the results.
    """
    KV_HEADS: tl.constexpr = Q_HEADS // SHARE
    item = items_ptr + tl.program_id(0) // KV_HEADS * ITEM_WORDS
    sequence = tl.load(item)
    if sequence < 0:
        return
    kv_head = (tl.program_id(0) % KV_HEADS).to(tl.int64)
    own = tl.arange(0, ROWS)
    row = tl.load(item + 1) + own
    new, context = tl.load(item + 3), tl.load(item + 4)
    begin = tl.load(item + 5) * KEYS  # so that the compiler knows what divides it
    end, part = tl.load(item + 6), tl.load(item + 7)
    valid = row < new * SHARE
    position = context - new + row // SHARE
    if WINDOW:
        oldest = tl.maximum(context - new + tl.load(item + 1) // SHARE - window + 1, 0)

    token = (tl.load(item + 2) + row // SHARE).to(tl.int64)
    head = kv_head * SHARE + row % SHARE
    col = tl.arange(0, K_PAD)
    q_mask = valid[:, None] & (col < K_DIM)[None, :]
    q_at = token[:, None] * q_token + head[:, None] * q_head + col[None, :] * q_dim
    q, unit = _read_queries(q_ptr, q_at, q_mask, ROWS, K_PAD, K_ROTATED, K_COMPUTE)
    runs = ()
    if K_KIND == INT4:
        runs = int4_queries(q, ROWS, K_DIM, K_PAD, K_RUN, K_WIDTH)

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    totals = tl.zeros((ROWS, KEYS), tl.float32)  # summed over the keys at the end
    out = tl.zeros((ROWS, V_PAD if V_KIND != INT4 else 16), tl.float32)
    outs = ()
    if V_KIND == INT4:
        for _ in tl.static_range(V_DIM // 2 // V_RUN):
            run = tl.zeros((ROWS, V_WIDTH), tl.float32)
            outs = outs + (run, run, totals, totals)
    table = tables_ptr + sequence.to(tl.int64) * table_stride
    row_scale = unit * scale
    if not SOFTCAP:
        row_scale = row_scale * LOG2_E

    k_codes += kv_head * kc_head
    k_scales += kv_head * ks_head
    v_codes += kv_head * vc_head
    v_scales += kv_head * vs_head
    for at in range(begin, end, KEYS):
        key = at + tl.arange(0, KEYS)
        inside = key < end
        if WINDOW:
            inside = inside & (key >= oldest)
        block = tl.load(table + key // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        slot = key % BLOCK_SIZE
        codes_at = block * kc_block + slot * kc_slot
        scales_at = block * ks_block + slot * ks_slot
        scores = _scores(
            q, runs, k_codes, k_scales, k_static, codes_at, scales_at, block * ks_block, slot, kv_head,
            inside, col, K_KIND, K_DIM, K_GROUP, K_RUN, K_WIDTH, K_COMPUTE, K_UNIT, ks_slot, K_STATIC,
            K_PAIRED, K_BITS,
        )  # fmt: skip
        scores = _capped_and_masked(
            scores * row_scale[:, None], softcap, key, position, inside, window, SOFTCAP, WINDOW
        )

        higher = tl.maximum(top, tl.max(scores, axis=1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(scores - safe[:, None])
        decay = tl.exp2(top - safe)
        totals = totals * decay[:, None] + p
        top = higher

        codes_at = block * vc_block + slot * vc_slot
        scales_at = block * vs_block + slot * vs_slot
        if V_KIND == INT4:
            outs = add_int4_values(
                outs, p, decay, v_codes, v_scales, codes_at, scales_at, inside,
                V_DIM, V_GROUP, V_RUN, V_WIDTH, V_COMPUTE, V_UNIT,
            )  # fmt: skip
        else:
            out = _plain_values(
                out, p, decay, v_codes, v_scales, v_static, codes_at, scales_at, block * vs_block, slot,
                kv_head, inside, V_KIND, V_DIM, V_PAD, V_GROUP, V_COMPUTE, V_UNIT, vs_slot, V_STATIC,
                V_PAIRED, V_BITS,
            )  # fmt: skip

    total = tl.sum(totals, axis=1)
    if V_KIND == INT4:
        out = joined(outs, ROWS, V_DIM, V_PAD, V_GROUP, V_RUN, V_WIDTH)
    if part < 0:
        row_at = token * Q_HEADS + head
        store_rows(
            out, top, total, out_ptr, lse_ptr, row_at * V_DIM, row_at, sink_ptr, head, valid,
            ROWS, V_DIM, V_PAD, V_ROTATED, SINKS,
        )  # fmt: skip
    else:
        part_at = (part.to(tl.int64) * KV_HEADS + kv_head) * height + own
        store_rows(
            out, top, total, parts_ptr, part_lses_ptr, part_at * V_PAD, part_at, sink_ptr, head, valid,
            ROWS, V_PAD, V_PAD, 1, False,
        )  # fmt: skip
