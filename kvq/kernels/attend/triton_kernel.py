"""The device code of `attend` in Triton: one kernel for decode and extend.

A program takes one tile of query rows (new token, query head of the KV head) of one sequence and one
KV head, and some or all of the keys, as the work list says. Codes are never scaled: the K scale and
minimum go to the scores, the V scale and minimum to the probabilities.

Source: Dao, "FlashAttention-2", 2023, section 3.1; Dao et al., "Flash-Decoding", 2023, for splits.
"""

import triton
import triton.language as tl

from kvq.kernels.attend.triton_channels import (
    added_offsets,
    channel_queries,
    channel_scores,
    channel_unit,
    is_paired,
    score_offsets,
)
from kvq.kernels.attend.triton_list import ITEM_WORDS, highest_key, lowest_key
from kvq.kernels.attend.triton_means import mean_scores, score_means
from kvq.kernels.attend.triton_results import LOG2_E, store_results, tile_rows
from kvq.kernels.attend.triton_rounded import rounded_queries, rounded_scores
from kvq.kernels.attend.triton_scales import is_narrow, row_scales, scaled
from kvq.kernels.attend.triton_values import (
    add_byte_values,
    add_packed_values,
    joined,
    values_of_means,
    word_outputs,
)
from kvq.kernels.attend.triton_words import (
    LEAST_COLUMNS,
    LEAST_KEYS,
    added_dot,
    byte_scores,
    dot,
    folded,
    packed_scores,
    word_queries,
)
from kvq.kernels.gpu.rows import CHANNEL, FLOAT, INT4, rotate, takes_ptx
from kvq.kernels.gpu.stored import mean_rows, stored_rows
from kvq.kernels.gpu.words import enlargement, exponent, low_unit


@triton.jit
def rows_at(
    start, block, first, slot, stride, STEP: tl.constexpr, PER: tl.constexpr, IN_ONE_BLOCK: tl.constexpr
):
    """Where a tile's rows lie: a pointer, and offsets [keys] from it; PER: neighbouring tokens of an element.

    In one block, the block is a number and `slot` counts from its token `first`; else it is one of each key.
    """
    if IN_ONE_BLOCK:
        start += block * stride + first // PER * STEP
        at = slot // PER * STEP
    else:
        at = block * stride + slot // PER * STEP
    return start, at


@triton.jit
def _scores(
    q, runs, sums, codes, scales, static, codes_at, scales_at, slot, kv_head, inside, col,
    KIND: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr,
    RUN: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, COMPUTE: tl.constexpr, STATIC: tl.constexpr,
    PAIRED: tl.constexpr, SPREAD: tl.constexpr, WINDOW: tl.constexpr, ROUNDED: tl.constexpr,
    means, means_at, MEAN_GROUP: tl.constexpr,
):  # fmt: skip
    """q . k of one tile, fp32 [rows, keys], but for what is the same for all keys; `runs`, `sums`: the
    queries as words of codes need them."""
    if WORDS and KIND >= INT4:
        before = tl.zeros((q.shape[0], inside.shape[0]), tl.float32)
        if MEAN_GROUP > 0:
            before = mean_scores(
                runs, sums[1:], means, means_at, inside.shape[0], DIM, MEAN_GROUP, RUN, WIDTH, COMPUTE
            )  # fmt: skip
        scores = packed_scores(
            runs, sums, before, codes, scales, codes_at, scales_at, inside, KIND,
            DIM, GROUP, RUN, WIDTH, PAIRS, COMPUTE, SPREAD,
        )  # fmt: skip
    elif WORDS or ROUNDED:
        if ROUNDED:
            scores = rounded_scores(q, codes, codes_at, inside, KIND, DIM)
        else:
            scores = byte_scores(runs, codes, codes_at, inside, KIND, DIM, WIDTH, COMPUTE)
        if not STATIC:
            scores = (
                scores
                * row_scales(scales, scales_at, slot, inside, PAIRED, SPREAD, WINDOW).to(tl.float32)[None, :]
            )
    else:
        k = dense_rows(
            codes, scales, static, codes_at, scales_at, kv_head, inside, col,
            KIND, BITS, DIM, GROUP, COMPUTE, STATIC,
        )  # fmt: skip
        if MEAN_GROUP > 0:
            k = _with_means(k, means, means_at, inside, col, DIM, MEAN_GROUP)
        scores = dot(q, tl.trans(k))
    return scores


@triton.jit
def dense_rows(
    codes, scales, static, codes_at, scales_at, head, inside, col,
    KIND: tl.constexpr, BITS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, COMPUTE: tl.constexpr,
    STATIC: tl.constexpr,
):  # fmt: skip
    """Rows that are not read as words, as COMPUTE numbers [keys, columns]."""
    if KIND == FLOAT:
        mask = inside[:, None] & (col < DIM)[None, :]
        rows = tl.load(codes + (codes_at[:, None] + col[None, :]), mask=mask, other=0).to(COMPUTE)
    else:
        rows = stored_rows(
            codes, scales, static, codes_at, scales_at, head, inside, col, KIND, BITS, DIM, GROUP, STATIC
        ).to(COMPUTE)
    return rows


@triton.jit
def _with_means(rows, means, at, inside, col, DIM: tl.constexpr, GROUP: tl.constexpr):
    """Rows [keys, columns] and the means of their blocks; `at`: bytes before each key's, or one for all."""
    if at.shape[0] == 1:
        mean = mean_rows(means, at, tl.arange(0, 1) == 0, col, DIM, GROUP)
    else:
        mean = mean_rows(means, at, inside, col, DIM, GROUP)
    return (rows.to(tl.float32) + mean).to(rows.dtype)


@triton.jit
def _values(
    outs, p, decay, codes, scales, static, codes_at, scales_at, slot, kv_head, inside,
    KIND: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    GROUP: tl.constexpr, RUN: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, COMPUTE: tl.constexpr,
    STATIC: tl.constexpr, PAIRED: tl.constexpr, SPREAD: tl.constexpr, WINDOW: tl.constexpr,
    means, means_at, MEAN_GROUP: tl.constexpr,
):  # fmt: skip
    """The parts of the output with one tile taken in."""
    if WORDS and KIND >= INT4:
        new = add_packed_values(
            outs, p, decay, codes, scales, codes_at, scales_at, inside, KIND,
            DIM, GROUP, RUN, WIDTH, PAIRS, COMPUTE, SPREAD, means, means_at, MEAN_GROUP,
        )  # fmt: skip
    elif WORDS:
        weights = p.to(COMPUTE)
        if not STATIC:
            scale = row_scales(scales, scales_at, slot, inside, PAIRED, SPREAD, WINDOW)
            weights = scaled(weights, scale)
        new = add_byte_values(outs, weights, decay, codes, codes_at, inside, KIND, DIM, WIDTH, COMPUTE)
    else:
        v = dense_rows(
            codes, scales, static, codes_at, scales_at, kv_head, inside, tl.arange(0, PAD),
            KIND, BITS, DIM, GROUP, COMPUTE, STATIC,
        )  # fmt: skip
        if MEAN_GROUP > 0:
            v = _with_means(v, means, means_at, inside, tl.arange(0, PAD), DIM, MEAN_GROUP)
        new = (added_dot(p.to(COMPUTE), v, outs[0] * decay[:, None]),)
    return new


@triton.jit
def _capped_and_masked(scores, softcap, key, last, before, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr):
    """Scores, capped ones as exponents of two, -inf where a row must not see a key: it sees up to `last`, and
    in a window what comes after `before`.
    """
    if SOFTCAP:
        grown = tl.exp2(scores * (2.0 / softcap * LOG2_E))
        scores = (softcap * LOG2_E) * (1.0 - 2.0 / (grown + 1.0))
    visible = key[None, :] <= last[:, None]
    if WINDOW:
        visible = visible & (key[None, :] > before[:, None])
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def weighed(
    scores, row_scale, added, top, key, last, before, softcap,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, FOLDED: tl.constexpr, ENLARGED: tl.constexpr,
    ADDED: tl.constexpr,
):  # fmt: skip
    """Weights of one tile and their sums, what earlier ones are to be multiplied by, and the new maxima.

    `row_scale`: of scores, and of exponents of e where they are not capped, as powers of two; `added` to all
    scores of a row, scaled, if ADDED. ENLARGED: what is added to exponents of weights.
    """
    if SOFTCAP:
        scores = scores * row_scale[:, None]
        if ADDED:
            scores += added[:, None]
    scores = _capped_and_masked(scores, softcap, key, last, before, SOFTCAP, WINDOW)
    highest = tl.max(scores, axis=1)
    if not SOFTCAP:  # scaled where the maximum is taken away: a product and a sum are one instruction
        highest = highest * row_scale
        scores = scores * row_scale[:, None]
        if ADDED:
            highest += added
    higher = tl.maximum(top, highest)
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    taken = safe - ENLARGED
    if ADDED and not SOFTCAP:
        taken -= added
    p = tl.exp2(scores - taken[:, None])
    decay = tl.exp2(top - safe)
    return p, folded(p, FOLDED), decay, higher


@triton.jit
def _logarithm(x):
    """log2 of what isn't negative, by one instruction where there is one: tl.log2 takes thirty."""
    if takes_ptx():
        y = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = tl.log2(x)
    return y


@triton.jit
def power_of_two(top):
    """The least that is not below `top`, and its inverse; 1 for 0, and neither where fp32 has no other."""
    exponent = tl.ceil(tl.log2(tl.where(top > 0, top, 1.0)))
    exponent = tl.minimum(tl.maximum(exponent, -126.0), 126.0)
    return tl.exp2(exponent), tl.exp2(-exponent)


@triton.jit
def _read_queries(
    q_ptr, at, mask, ROWS: tl.constexpr, PAD: tl.constexpr, ROTATED: tl.constexpr, COMPUTE: tl.constexpr,
    ROUNDED: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Queries as COMPUTE numbers [ROWS, PAD], or ROUNDED to codes of K's KIND, and what each row's scores are
    to be multiplied by.

    fp16 can't hold every bf16 number, nor the sums of large ones, so rows are divided by a power of two.
    """
    x = tl.load(q_ptr + at, mask=mask, other=0.0)
    unit = tl.full((ROWS,), 1.0, tl.float32)
    if (ROTATED > 1) or ROUNDED or COMPUTE == tl.float16:
        y = x.to(tl.float32)
        if ROTATED > 1:
            y = rotate(y, ROWS, PAD, ROTATED)
        if ROUNDED:
            x, unit = rounded_queries(y, KIND)
        else:
            if COMPUTE == tl.float16:
                unit, inverse = power_of_two(tl.max(tl.abs(y), axis=1))
                y = y * inverse[:, None]
            x = y.to(COMPUTE)
    else:
        x = x.to(COMPUTE)
    return x, unit


# Numbers that change from step to step would else be compiled for: 1, multiples of 16, and others.
VARYING = ["table_stride", "window", "height", "recent", "part_first", "part_last"]


@triton.jit(do_not_specialize=VARYING)
def attend_kernel(
    q_ptr, out_ptr, lse_ptr, parts_ptr, part_lses_ptr, items_ptr, tables_ptr, sink_ptr, room_ptr,
    q_token, q_head, q_dim, table_stride, height,
    k_codes, k_scales, k_static, kc_block, kc_head, kc_slot: tl.constexpr,
    ks_block, ks_head, ks_slot: tl.constexpr,
    v_codes, v_scales, v_static, vc_block, vc_head, vc_slot: tl.constexpr,
    vs_block, vs_head, vs_slot: tl.constexpr,
    k_means, km_block, km_head, v_means, vm_block, vm_head,
    scale, softcap, window, recent, part_first, part_last,
    K_KIND: tl.constexpr, K_BITS: tl.constexpr, K_DIM: tl.constexpr, K_PAD: tl.constexpr,
    K_GROUP: tl.constexpr, K_ROTATED: tl.constexpr, K_STATIC: tl.constexpr, K_PAIRED: tl.constexpr,
    V_KIND: tl.constexpr, V_BITS: tl.constexpr, V_DIM: tl.constexpr, V_PAD: tl.constexpr,
    V_GROUP: tl.constexpr, V_ROTATED: tl.constexpr, V_STATIC: tl.constexpr, V_PAIRED: tl.constexpr,
    K_WORDS: tl.constexpr, K_RUN: tl.constexpr, K_WIDTH: tl.constexpr, K_PAIRS: tl.constexpr,
    K_COMPUTE: tl.constexpr, K_ROUNDED: tl.constexpr, K_MEAN_GROUP: tl.constexpr,
    V_MEAN_GROUP: tl.constexpr,
    V_WORDS: tl.constexpr, V_RUN: tl.constexpr, V_WIDTH: tl.constexpr, V_PAIRS: tl.constexpr,
    V_COMPUTE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, Q_HEADS: tl.constexpr, SHARE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, FOLDED: tl.constexpr, SPREAD: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, LOWER: tl.constexpr, AGE: tl.constexpr,
    AGE_BLOCK: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Grid: items times KV heads, the heads of an item side by side. `SHARE`: query heads of one KV head.

    FOLDED: sums over keys that are kept apart till the end, so that no loop adds over threads. LOWER: whether
    keys are left out before others of their tile. AGE, AGE_BLOCK: of the part of the keys that is seen.

    An item that is part of a tile's keys stores to `parts_ptr`, fp32 [parts, KV heads, height, V_PAD],
    still rotated, and to `part_lses_ptr`; one that is all of them stores the results.

    APART: means are taken in before and after the loop over keys; in between lies what `room_ptr`, fp32
    [tokens, query heads, 1 + tiles of a block, table_stride], holds: the scores of all blocks' means, then
    the sums of all tiles' weights. Rows of a tile that are none read the first one's and store nothing.
    """
    KV_HEADS: tl.constexpr = Q_HEADS // SHARE
    item = items_ptr + tl.program_id(0) // KV_HEADS * ITEM_WORDS
    sequence = tl.load(item)
    if sequence < 0:
        return
    kv_head = tl.program_id(0) % KV_HEADS
    own = tl.arange(0, ROWS)
    valid, position, token, head = tile_rows(item, own, kv_head, SHARE)
    context = tl.load(item + 4)
    begin = tl.load(item + 5) * KEYS  # so that the compiler knows what divides it
    end = tl.load(item + 6)
    if LOWER:
        of_first = context - tl.load(item + 3) + tl.load(item + 1) // SHARE
        oldest = lowest_key(of_first, window, recent, part_first, WINDOW, CHUNK, AGE, AGE_BLOCK)

    col = tl.arange(0, K_PAD)
    q_mask = valid[:, None] & (col < K_DIM)[None, :]
    q_col = col
    if K_WORDS and is_paired(K_KIND, K_BITS):  # the second half backwards
        q_col = tl.where(col < K_DIM // 2, col, K_DIM + K_DIM // 2 - 1 - col)
    q_at = token[:, None] * q_token + head[:, None] * q_head + q_col[None, :] * q_dim
    q, unit = _read_queries(
        q_ptr, q_at, q_mask, ROWS, K_PAD, K_ROTATED, K_COMPUTE, K_ROUNDED, K_KIND
    )  # fmt: skip
    runs = ()
    sums = ()
    CHANNELS: tl.constexpr = K_WORDS and K_KIND >= CHANNEL
    LEFT: tl.constexpr = APART and (K_MEAN_GROUP > 0 or CHANNELS)  # means or offsets of K are in the room
    k_mean_at = kv_head.to(tl.int64) * km_head
    v_mean_at = kv_head.to(tl.int64) * vm_head
    if APART:
        room_row = (1 + BLOCK_SIZE // KEYS) * table_stride
        room_at = tl.where(valid, token.to(tl.int32) * Q_HEADS + head, 0) * room_row
        if CHANNELS:
            score_offsets(
                q, room_ptr, room_at, valid, tables_ptr + sequence.to(tl.int64) * table_stride,
                begin // BLOCK_SIZE, tl.cdiv(end, BLOCK_SIZE),
                k_scales + kv_head.to(tl.int64) * ks_head, ks_block, K_KIND, K_BITS, K_DIM,
            )  # fmt: skip
        if K_MEAN_GROUP > 0:
            score_means(
                q, room_ptr, room_at, valid, tables_ptr + sequence.to(tl.int64) * table_stride,
                begin // BLOCK_SIZE, tl.cdiv(end, BLOCK_SIZE),
                k_means + k_mean_at, km_block, K_DIM, K_MEAN_GROUP, K_COMPUTE,
            )  # fmt: skip
    if CHANNELS:
        runs = channel_queries(q, K_KIND, K_BITS, K_DIM, K_RUN, K_WIDTH)
    elif K_WORDS:
        K_STEP: tl.constexpr = 1 if is_narrow(k_scales) else 2
        runs, sums = word_queries(q, K_KIND, K_DIM, K_GROUP, K_RUN, K_WIDTH, K_PAIRS, K_STEP)
        if K_MEAN_GROUP > 0 and not APART:
            _, of_means = word_queries(q, K_KIND, K_DIM, K_MEAN_GROUP, K_RUN, K_WIDTH, LEAST_COLUMNS, 1)
            sums = sums + of_means

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    totals = tl.zeros((ROWS, FOLDED), tl.float32)  # summed over the keys at the end
    outs = (tl.zeros((ROWS, V_PAD), tl.float32),)
    if V_WORDS:
        outs = word_outputs(ROWS, V_KIND, V_DIM, V_RUN, V_WIDTH, V_PAIRS)
    table = tables_ptr + sequence.to(tl.int64) * table_stride
    row_scale = unit * scale
    if K_ROUNDED or (K_WORDS and K_KIND < INT4):
        if K_STATIC:
            row_scale = row_scale * tl.load(k_static + kv_head)
        if not K_ROUNDED:
            row_scale = row_scale * low_unit(K_KIND, K_COMPUTE)
    if not SOFTCAP:
        row_scale = row_scale * LOG2_E
    mean_scale = row_scale
    if CHANNELS:
        row_scale = row_scale * channel_unit(K_KIND, K_BITS, K_COMPUTE)
    last = tl.minimum(highest_key(position, recent, part_last, AGE, AGE_BLOCK), end - 1)
    before = lowest_key(position, window, recent, part_first, WINDOW, CHUNK, AGE, AGE_BLOCK) - 1

    k_codes += kv_head.to(tl.int64) * kc_head
    k_scales += kv_head.to(tl.int64) * ks_head
    v_codes += kv_head.to(tl.int64) * vc_head
    v_scales += kv_head.to(tl.int64) * vs_head
    # Exponents of probabilities are raised by that, for weights in fp16; narrow scales are enlarged instead,
    # and means multiply sums of weights.
    IS_RAISED: tl.constexpr = V_WORDS and not is_narrow(v_scales)
    SUMMED: tl.constexpr = KEYS // LEAST_KEYS if V_WORDS and V_MEAN_GROUP > 0 and not APART else 1
    ENLARGED: tl.constexpr = enlargement(V_KIND, V_COMPUTE) if IS_RAISED else -exponent(SUMMED)
    ONE: tl.constexpr = BLOCK_SIZE % KEYS == 0  # a tile lies in one block
    own_key = tl.arange(0, KEYS)
    for at in range(begin, end, KEYS):
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
        codes, codes_at = rows_at(k_codes, block, first, slot, kc_block, kc_slot, 1, ONE)
        scales, scales_at = rows_at(k_scales, block, first, slot, ks_block, ks_slot, 1 + K_PAIRED, ONE)
        if CHANNELS:
            if not LEFT:
                of_mean = added_offsets(q, scales, K_KIND, K_BITS, K_DIM) * mean_scale
            scores = channel_scores(
                runs, codes, scales, codes_at, inside, K_KIND, K_BITS, K_DIM, K_RUN, K_WIDTH, K_COMPUTE
            )  # fmt: skip
        else:
            scores = _scores(
                q, runs, sums, codes, scales, k_static, codes_at, scales_at, slot, kv_head, inside, col,
                K_KIND, K_WORDS, K_BITS, K_DIM, K_GROUP, K_RUN, K_WIDTH, K_PAIRS, K_COMPUTE, K_STATIC,
                K_PAIRED, SPREAD, LOWER, K_ROUNDED,
                k_means, blocks * km_block + k_mean_at, 0 if APART else K_MEAN_GROUP,
            )  # fmt: skip
        p, sums_of_p, decay, top = weighed(
            scores, row_scale, of_mean, top, own_key, last - at, before - at, softcap,
            SOFTCAP, LOWER, FOLDED, ENLARGED, LEFT or CHANNELS,
        )  # fmt: skip
        totals = totals * decay[:, None] + sums_of_p
        if APART and V_MEAN_GROUP > 0:
            summed = top + _logarithm(tl.sum(sums_of_p, axis=1))
            tl.store(room_ptr + (room_at + table_stride + at // KEYS), summed, mask=valid)

        codes, codes_at = rows_at(v_codes, block, first, slot, vc_block, vc_slot, 1, ONE)
        scales, scales_at = rows_at(v_scales, block, first, slot, vs_block, vs_slot, 1 + V_PAIRED, ONE)
        outs = _values(
            outs, p, decay, codes, scales, v_static, codes_at, scales_at, slot, kv_head, inside,
            V_KIND, V_WORDS, V_BITS, V_DIM, V_PAD, V_GROUP, V_RUN, V_WIDTH, V_PAIRS, V_COMPUTE, V_STATIC,
            V_PAIRED, SPREAD, LOWER,
            v_means, blocks * vm_block + v_mean_at, 0 if APART else V_MEAN_GROUP,
        )  # fmt: skip

    out = outs[0]
    if V_WORDS:
        V_STEP: tl.constexpr = 1 if is_narrow(v_scales) else 2
        out = joined(
            outs, V_KIND, V_DIM, V_PAD, V_GROUP, V_RUN, V_COMPUTE, V_STEP, 0 if APART else V_MEAN_GROUP
        )  # fmt: skip
        if V_STATIC:
            out = out * tl.load(v_static + kv_head)
    if APART and V_MEAN_GROUP > 0:
        out += values_of_means(
            room_ptr, room_at + table_stride, top, table, begin, end, v_means + v_mean_at, vm_block,
            ROWS, V_DIM, V_PAD, V_MEAN_GROUP, V_COMPUTE, KEYS, BLOCK_SIZE,
        )  # fmt: skip
    store_results(
        out, top - ENLARGED, tl.sum(totals, axis=1), out_ptr, lse_ptr, parts_ptr, part_lses_ptr, item,
        kv_head, height, sink_ptr, ROWS, KV_HEADS, SHARE, V_DIM, V_PAD, V_ROTATED, SINKS,
    )  # fmt: skip
