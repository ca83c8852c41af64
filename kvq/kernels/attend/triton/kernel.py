"""The Triton kernel for attention over blocks, used for both decode and extend.

A program handles one tile of query rows (new token, query head of the KV head) of one sequence and one KV
head, and some or all of the keys, as specified in the work list. Codes are never scaled: K's scale and
minimum are applied to the scores, V's scale and minimum to the probabilities.

Source: Dao, "FlashAttention-2", 2023, section 3.1; Dao et al., "Flash-Decoding", 2023, for splits.
"""

import triton
import triton.language as tl

from kvq.kernels.attend.triton.channels import (
    added_offsets,
    channel_queries,
    channel_scores,
    channel_unit,
    is_paired,
    score_offsets,
)
from kvq.kernels.attend.triton.list_kernel import ITEM_WORDS, OLD, YOUNG, edge, highest_key, lowest_key
from kvq.kernels.attend.triton.means import score_means
from kvq.kernels.attend.triton.results import LOG2_E, logarithm, store_results, tile_rows
from kvq.kernels.attend.triton.scales import is_narrow
from kvq.kernels.attend.triton.tile import read_queries, tile_of, tile_scores, weighed, with_values
from kvq.kernels.attend.triton.values import joined, values_of_means, word_outputs
from kvq.kernels.attend.triton.words import LEAST_COLUMNS, LEAST_KEYS, word_queries
from kvq.kernels.gpu.launch import opened
from kvq.kernels.gpu.rows import CHANNEL, INT4, INTERPRETED, rotated
from kvq.kernels.gpu.words import enlargement, exponent, low_unit

# For numbers that change between steps, Triton would otherwise compile variants: 1, multiples of 16, others.
VARYING = ["table_stride", "recent_stride", "sinks_stride", "height"]  # D129


@triton.jit(do_not_specialize=VARYING)
def attend_kernel(
    q_ptr, out_ptr, lse_ptr, parts_ptr, part_lses_ptr, items_ptr, tables_ptr, sink_ptr, room_ptr,
    recent_tables_ptr, sinks_tables_ptr, q_token, q_head, q_dim, table_stride, height, recent_stride,
    sinks_stride, k, v, limits, near,
    BLOCK_SIZE: tl.constexpr, Q_HEADS: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, FOLDED: tl.constexpr, SPREAD: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    LOWER: tl.constexpr, AGE: tl.constexpr, AGE_BLOCK: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Compute attention. Grid: items x KV heads (adjacent for an item). `SHARE`: query heads per KV head.

    FOLDED: number of partial sums over keys, added at the end, so that the loop needs no sums across threads.
    LOWER: whether a tile may have hidden keys before visible ones. AGE, AGE_BLOCK: age and block size of the
    visible part. `limits`: scale, softcap, window, then the numbers of a part. `near`: None, or Near.

    An item with a part of a tile's keys stores partial results, rotated unless some are unquantized, to
    `parts_ptr`, fp32 [parts, KV heads, height, v.pad], and to `part_lses_ptr`; an item with all keys stores
    final results.

    APART: means are added before and after the loop over keys. `room_ptr`, fp32 [tokens, query heads, 1 +
    tiles of a block, table_stride], has the scores of all blocks' means, then the sums of all tiles' weights.
    Rows past the end of a tile read the numbers of the first row and store nothing.
    """
    if INTERPRETED:
        k, v = opened(k), opened(v)
        near = opened(near)
    KV_HEADS: tl.constexpr = Q_HEADS // SHARE
    STAGED: tl.constexpr = near is not None
    item = items_ptr + tl.program_id(0) // KV_HEADS * ITEM_WORDS
    sequence = tl.load(item)
    if sequence < 0:
        return
    kv_head = tl.program_id(0) % KV_HEADS
    valid, position, token, head = tile_rows(item, tl.arange(0, ROWS), kv_head, SHARE)
    context = tl.load(item + 4)
    begin = tl.load(item + 5) * KEYS  # so that the compiler knows what divides it
    end = tl.load(item + 6)
    of_first = context
    if LOWER or STAGED:
        of_first = context - tl.load(item + 3) + tl.load(item + 1) // SHARE
    own = (q_ptr, q_token, q_head, q_dim, kv_head, valid, position, token, head, of_first) + limits
    first_old, end_of_old = begin, end
    if STAGED:
        recent = limits[3]
        first_old = tl.maximum(begin, near.exact // KEYS * KEYS)
        rows = tl.minimum(tl.load(item + 1) + ROWS, tl.load(item + 3) * SHARE)
        of_last = context - tl.load(item + 3) + (rows - 1) // SHARE
        end_of_old = tl.minimum(end, edge(of_last, recent, AGE_BLOCK))
    out, top, totals = _over_keys(
        own, first_old, end_of_old, tables_ptr + sequence.to(tl.int64) * table_stride, table_stride, room_ptr,
        k, v, (), BLOCK_SIZE, Q_HEADS, ROWS, KEYS, FOLDED, SPREAD, WINDOW, CHUNK, LOWER,
        OLD if STAGED else AGE, AGE_BLOCK, SOFTCAP, APART,
    )  # fmt: skip
    if STAGED:  # read again, so that the first loop needs no registers for it
        valid, position, token, head = tile_rows(item, tl.arange(0, ROWS), kv_head, SHARE)
        begin, end = tl.load(item + 5, volatile=True) * KEYS, tl.load(item + 6, volatile=True)
        of_first = tl.load(item + 4, volatile=True) - tl.load(item + 3, volatile=True)
        of_first += tl.load(item + 1, volatile=True) // SHARE
        own = (q_ptr, q_token, q_head, q_dim, kv_head, valid, position, token, head, of_first) + limits
        first_young = edge(of_first, recent, AGE_BLOCK)
        is_plain = (end > first_young) | (begin < near.exact) | (tl.load(item + 7) < 0)
        if is_plain:
            if v.rotated > 1:
                out = rotated(out, ROWS, v.pad, v.rotated)
            wide = tl.load(item, volatile=True).to(tl.int64)
            out, top, totals = _over_keys(
                own, tl.maximum(begin, first_young // KEYS * KEYS), end,
                recent_tables_ptr + wide * recent_stride, recent_stride, room_ptr, near.k, near.v,
                (out, top, totals), near.block_size, Q_HEADS, ROWS, KEYS, FOLDED, SPREAD, WINDOW, CHUNK, True,
                YOUNG, AGE_BLOCK, SOFTCAP, False,
            )  # fmt: skip
            if near.exact > 0:
                out, top, totals = _over_keys(
                    own[:-2] + (0, near.exact), begin, tl.minimum(end_of_old, near.exact),
                    sinks_tables_ptr + wide * sinks_stride, sinks_stride, room_ptr, near.sinks_k,
                    near.sinks_v, (out, top, totals), near.block_size, Q_HEADS, ROWS, KEYS, FOLDED, SPREAD,
                    WINDOW, CHUNK, True, OLD, AGE_BLOCK, SOFTCAP, False,
                )  # fmt: skip
    MIXED: tl.constexpr = STAGED and v.rotated > 1
    store_results(
        out, top, tl.sum(totals, axis=1), out_ptr, lse_ptr, parts_ptr, part_lses_ptr, item,
        kv_head, height, sink_ptr, ROWS, KV_HEADS, SHARE, v.dim, v.pad, 1 if MIXED else v.rotated, SINKS,
        is_plain if MIXED else None,
    )  # fmt: skip


@triton.jit
def _over_keys(
    own, begin, end, table, table_stride, room_ptr, k, v, before_them, BLOCK_SIZE: tl.constexpr,
    Q_HEADS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, FOLDED: tl.constexpr, SPREAD: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, LOWER: tl.constexpr, AGE: tl.constexpr,
    AGE_BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Return the sums of an item's rows over the keys [begin, end) of one form: fp32 [ROWS, v.pad], the
    maxima [ROWS], and sums of weights [ROWS, FOLDED]. `before_them`: those of other keys, or none."""
    (
        q_ptr, q_token, q_head, q_dim, kv_head, valid, position, token, head, of_first, scale, softcap,
        window, recent, part_first, part_last,
    ) = own  # fmt: skip
    if LOWER:
        oldest = lowest_key(of_first, window, recent, part_first, WINDOW, CHUNK, AGE, AGE_BLOCK)
    col = tl.arange(0, k.pad)
    q_mask = valid[:, None] & (col < k.dim)[None, :]
    q_col = col
    if k.read.words and is_paired(k.kind, k.bits):  # the second half backwards
        q_col = tl.where(col < k.dim // 2, col, k.dim + k.dim // 2 - 1 - col)
    q_at = token[:, None] * q_token + head[:, None] * q_head + q_col[None, :] * q_dim
    q, unit = read_queries(q_ptr, q_at, q_mask, k, ROWS)
    runs = ()
    sums = ()
    CHANNELS: tl.constexpr = k.read.words and k.kind >= CHANNEL
    LEFT: tl.constexpr = APART and (k.mean_group > 0 or CHANNELS)  # K's means or offsets are in `room_ptr`
    k_mean_at = kv_head.to(tl.int64) * k.mean_strides.head
    v_mean_at = kv_head.to(tl.int64) * v.mean_strides.head
    if APART:
        room_row = (1 + BLOCK_SIZE // KEYS) * table_stride
        room_at = tl.where(valid, token.to(tl.int32) * Q_HEADS + head, 0) * room_row
        if CHANNELS:
            score_offsets(
                q, k, room_ptr, room_at, valid, table, begin // BLOCK_SIZE, tl.cdiv(end, BLOCK_SIZE),
                k.scales + kv_head.to(tl.int64) * k.scale_strides.head,
            )  # fmt: skip
        if k.mean_group > 0:
            score_means(
                q, k, room_ptr, room_at, valid, table, begin // BLOCK_SIZE, tl.cdiv(end, BLOCK_SIZE),
                k.means + k_mean_at,
            )  # fmt: skip
    if CHANNELS:
        runs = channel_queries(q, k)
    elif k.read.words:
        K_STEP: tl.constexpr = 1 if is_narrow(k.scales) else 2
        runs, sums = word_queries(q, k.kind, k.dim, k.group, k.read.run, k.read.width, k.read.pairs, K_STEP)
        if k.mean_group > 0 and not APART:
            _, of_means = word_queries(
                q, k.kind, k.dim, k.mean_group, k.read.run, k.read.width, LEAST_COLUMNS, 1
            )
            sums = sums + of_means

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    totals = tl.zeros((ROWS, FOLDED), tl.float32)  # summed over the keys at the end
    outs = (tl.zeros((ROWS, v.pad), tl.float32),)
    if v.read.words:
        outs = word_outputs(ROWS, v.kind, v.dim, v.read.run, v.read.width, v.read.pairs)
    if len(before_them) > 0:
        outs, top, totals = (before_them[0],), before_them[1], before_them[2]
    row_scale = unit * scale
    if k.read.rounded or (k.read.words and k.kind < INT4):
        if k.static is not None:
            row_scale = row_scale * tl.load(k.static + kv_head)
        if not k.read.rounded:
            row_scale = row_scale * low_unit(k.kind, k.read.compute)
    if not SOFTCAP:
        row_scale = row_scale * LOG2_E
    mean_scale = row_scale
    if CHANNELS:
        row_scale = row_scale * channel_unit(k.kind, k.bits, k.read.compute)
    last = tl.minimum(highest_key(position, recent, part_last, AGE, AGE_BLOCK), end - 1)
    before = lowest_key(position, window, recent, part_first, WINDOW, CHUNK, AGE, AGE_BLOCK) - 1

    k_codes = k.codes + kv_head.to(tl.int64) * k.code_strides.head
    k_scales = k.scales + kv_head.to(tl.int64) * k.scale_strides.head
    v_codes = v.codes + kv_head.to(tl.int64) * v.code_strides.head
    v_scales = v.scales + kv_head.to(tl.int64) * v.scale_strides.head
    # ENLARGED is added to exponents of probabilities, for weights in fp16; narrow scales are enlarged
    # instead, and means multiply sums of weights.
    IS_RAISED: tl.constexpr = v.read.words and not is_narrow(v.scales)
    SUMMED: tl.constexpr = KEYS // LEAST_KEYS if v.read.words and v.mean_group > 0 and not APART else 1
    ENLARGED: tl.constexpr = enlargement(v.kind, v.read.compute) if IS_RAISED else -exponent(SUMMED)
    ONE: tl.constexpr = BLOCK_SIZE % KEYS == 0  # a tile lies in one block
    own_key = tl.arange(0, KEYS)
    STAGES: tl.constexpr = 1 if len(before_them) > 0 else None  # few keys: no buffers
    for at in tl.range(begin, end, KEYS, num_stages=STAGES):
        inside = own_key < end - at
        if LOWER:
            inside = inside & (own_key >= oldest - at)
        of_mean = tl.zeros((ROWS,), tl.float32)
        if LEFT:
            of_mean = tl.load(room_ptr + (room_at + at // BLOCK_SIZE)) * mean_scale
        first = at % BLOCK_SIZE
        if ONE:
            block = tl.load(table + at // BLOCK_SIZE).to(tl.int64)
            slot = own_key
            blocks = block + tl.arange(0, 1)  # of all keys
        else:
            key = at + own_key
            block = tl.load(table + key // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            slot = key % BLOCK_SIZE
            blocks = block
        means_at = blocks * k.mean_strides.block + k_mean_at
        tile = tile_of(k, k_codes, k_scales, means_at, block, first, slot, kv_head, inside, ONE)
        if CHANNELS:
            if not LEFT:
                of_mean = added_offsets(q, k, tile.scales) * mean_scale
            scores = channel_scores(runs, k, tile)
        else:
            scores = tile_scores(q, runs, sums, k, tile, SPREAD, LOWER, 0 if APART else k.mean_group)
        p, sums_of_p, decay, top = weighed(
            scores, row_scale, of_mean, top, own_key, last - at, before - at, softcap,
            SOFTCAP, LOWER, FOLDED, ENLARGED, LEFT or CHANNELS,
        )  # fmt: skip
        totals = totals * decay[:, None] + sums_of_p
        if APART and v.mean_group > 0:
            summed = top + logarithm(tl.sum(sums_of_p, axis=1))
            tl.store(room_ptr + (room_at + table_stride + at // KEYS), summed, mask=valid)

        means_at = blocks * v.mean_strides.block + v_mean_at
        tile = tile_of(v, v_codes, v_scales, means_at, block, first, slot, kv_head, inside, ONE)
        outs = with_values(outs, p, decay, v, tile, SPREAD, LOWER, 0 if APART else v.mean_group)

    out = outs[0]
    if v.read.words:
        V_STEP: tl.constexpr = 1 if is_narrow(v.scales) else 2
        out = joined(
            outs, v.kind, v.dim, v.pad, v.group, v.read.run, v.read.compute, V_STEP,
            0 if APART else v.mean_group,
        )  # fmt: skip
        if v.static is not None:
            out = out * tl.load(v.static + kv_head)
    if APART and v.mean_group > 0:
        out += values_of_means(
            v, room_ptr, room_at + table_stride, top, table, begin, end, v.means + v_mean_at,
            ROWS, KEYS, BLOCK_SIZE,
        )  # fmt: skip
    return out, top - ENLARGED, totals
