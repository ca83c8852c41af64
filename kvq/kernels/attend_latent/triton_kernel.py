"""Device code of `attend_latent` in Triton: decode and extend, as in the kernel of `attend`.

Codes are decoded once per tile, in registers, and stored in shared memory, from which both products read them
for all query heads of a tile. FP8 and INT8 codes stay unscaled, so that their values are exact; INT4 codes
are decoded with their groups' scales and minimums. Queries are rotated first, like rows; results stay
rotated.
"""

import triton
import triton.language as tl

from kvq.kernels.attend.triton.kernel import VARYING
from kvq.kernels.attend.triton.list_kernel import ITEM_WORDS
from kvq.kernels.attend.triton.results import LOG2_E, store_results, tile_rows
from kvq.kernels.attend.triton.scales import row_scales, runs_of, scaled
from kvq.kernels.attend.triton.tile import dense_rows, power_of_two, tile_of, weighed
from kvq.kernels.attend.triton.values import all_side_by_side
from kvq.kernels.attend.triton.words import added_dot
from kvq.kernels.gpu.launch import opened
from kvq.kernels.gpu.rows import FP8, INTERPRETED, int8_codes, nibbles, scale_and_minimum
from kvq.kernels.gpu.words import enlargement, fp8_numbers, low_unit


@triton.jit
def _queries(q_ptr, at, valid, stride, k, v, PARTS: tl.constexpr):
    """Return the queries' rotary part, their latent part split into PARTS, and a factor for scores."""
    col = tl.arange(0, v.pad)
    mask = valid[:, None] & (col < v.dim)[None, :]
    latent = tl.load(q_ptr + at[:, None] + col[None, :] * stride, mask=mask, other=0.0)
    col = tl.arange(0, k.pad)
    mask = valid[:, None] & (col < k.dim)[None, :]
    rotary = tl.load(q_ptr + at[:, None] + (v.dim + col)[None, :] * stride, mask=mask, other=0.0)
    unit = tl.full((valid.shape[0],), 1.0, tl.float32)
    if k.read.compute == tl.float16 or v.read.compute == tl.float16:  # as queries of `attend` are divided
        latent, rotary = latent.to(tl.float32), rotary.to(tl.float32)
        unit, inverse = power_of_two(
            tl.maximum(tl.max(tl.abs(latent), axis=1), tl.max(tl.abs(rotary), axis=1))
        )
        latent, rotary = latent * inverse[:, None], rotary * inverse[:, None]
    return rotary.to(k.read.compute), runs_of(latent.to(v.read.compute), PARTS), unit


@triton.jit
def _scaled(codes, words, BITS: tl.constexpr, SHIFT: tl.constexpr, COMPUTE: tl.constexpr):
    """Return the values of codes minus SHIFT, COMPUTE [keys, columns]; `words`: scales [keys, groups]."""
    GROUPS: tl.constexpr = words.shape[1]
    scale, minimum = scale_and_minimum(words, BITS)
    grouped = tl.reshape(codes, (codes.shape[0], GROUPS, codes.shape[1] // GROUPS))
    moved = (minimum + SHIFT * scale).to(COMPUTE)
    values = grouped * scale.to(COMPUTE)[:, :, None] + moved[:, :, None]
    return tl.reshape(values, codes.shape)


@triton.jit
def _run(
    v, tile, START: tl.constexpr, WIDTH: tl.constexpr,
    CODES: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Return columns [START, START + WIDTH) of a tile's latents, [keys, WIDTH]; with HALVES, also the same
    columns counted from the middle of the row. CODES: the codes stay unscaled."""
    COMPUTE: tl.constexpr = v.read.compute
    col = START + tl.arange(0, WIDTH)
    if HALVES:
        inside = tile.inside[:, None]
        packed = tl.load(tile.codes + (tile.codes_at[:, None] + col[None, :]), mask=inside, other=0)
        low, high = nibbles(packed, COMPUTE)
        GROUPS: tl.constexpr = max(1, WIDTH // v.group)
        MIDDLE: tl.constexpr = 0 if v.group == v.dim else v.dim // 2 // v.group
        at = tile.scales_at[:, None] + START // v.group + tl.arange(0, GROUPS)[None, :]
        low = _scaled(low, tl.load(tile.scales + at, mask=inside, other=0), v.bits, 8.0, COMPUTE)
        words = tl.load(tile.scales + (at + MIDDLE), mask=inside, other=0)
        high = _scaled(high, words, v.bits, 8.0, COMPUTE)
        parts = (low, high)
    elif CODES:
        mask = tile.inside[:, None] & (col < v.dim)[None, :]
        stored = tl.load(tile.codes + (tile.codes_at[:, None] + col[None, :]), mask=mask, other=0)
        parts = (fp8_numbers(stored, COMPUTE) if v.kind == FP8 else int8_codes(stored, COMPUTE),)
    else:
        parts = (dense_rows(v, tile, col),)
    return parts


@triton.jit(do_not_specialize=VARYING)
def latent_kernel(  # D142: rotary keys as K, latents as V
    q_ptr, out_ptr, lse_ptr, parts_ptr, part_lses_ptr, items_ptr, tables_ptr, sink_ptr,
    q_token, q_head, q_dim, table_stride, height, k, v, scale, softcap, window,
    PARTS: tl.constexpr, HALVES: tl.constexpr, CODES: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    Q_HEADS: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, FOLDED: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Attend over latents. Grid: items. Arguments are those of `attend_kernel`, with one KV head; K is the
    rotary part of keys, and V is the latents, read in PARTS to save registers. HALVES: V is INT4, whose bytes
    have one element from each half of a row. CODES: V is FP8 or INT8."""
    if INTERPRETED:
        k, v = opened(k), opened(v)
    item = items_ptr + tl.program_id(0) * ITEM_WORDS
    sequence = tl.load(item)
    if sequence < 0:
        return
    own = tl.arange(0, ROWS)
    valid, position, token, head = tile_rows(item, own, 0, SHARE)
    context = tl.load(item + 4)
    begin = tl.load(item + 5) * KEYS
    end = tl.load(item + 6)
    if WINDOW:
        oldest = tl.maximum(context - tl.load(item + 3) + tl.load(item + 1) // SHARE - window + 1, 0)
    rotary, latents, unit = _queries(q_ptr, token * q_token + head * q_head, valid, q_dim, k, v, PARTS)

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    totals = tl.zeros((ROWS, FOLDED), tl.float32)
    outs = ()
    for _ in tl.static_range(PARTS):
        outs = outs + (tl.zeros((ROWS, v.pad // PARTS), tl.float32),)
    table = tables_ptr + sequence.to(tl.int64) * table_stride
    row_scale = unit * scale
    if not SOFTCAP:
        row_scale = row_scale * LOG2_E
    last = tl.minimum(position, end - 1)
    UNIT: tl.constexpr = low_unit(v.kind, v.read.compute)
    ENLARGED: tl.constexpr = enlargement(v.kind, v.read.compute) if CODES else 0.0
    ONE: tl.constexpr = BLOCK_SIZE % KEYS == 0  # a tile lies in one block
    own_key = tl.arange(0, KEYS)
    for at in range(begin, end, KEYS):
        key = at + own_key
        inside = key < end
        if WINDOW:
            inside = inside & (key >= oldest)
        first = at % BLOCK_SIZE
        if ONE:
            block = tl.load(table + at // BLOCK_SIZE).to(tl.int64)
            slot = own_key
        else:
            block = tl.load(table + key // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            slot = key % BLOCK_SIZE
        tile = tile_of(v, v.codes, v.scales, 0, block, first, slot, 0, inside, ONE)
        scores = tl.zeros((ROWS, KEYS), tl.float32)
        parts = ()
        for i in tl.static_range(PARTS // (1 + HALVES)):
            run = _run(v, tile, i * (v.pad // PARTS), v.pad // PARTS, CODES, HALVES)
            scores = added_dot(latents[i], tl.trans(run[0]), scores)
            if HALVES:
                scores = added_dot(latents[PARTS // 2 + i], tl.trans(run[1]), scores)
            parts = parts + run
        if CODES and v.static is not None:
            scores = scores * (tl.load(v.static) * UNIT)
        elif CODES:
            of_row = row_scales(v, tile, 1, WINDOW)
            scores = scores * (of_row.to(tl.float32) * UNIT)[None, :]
        tile = tile_of(k, k.codes, k.scales, 0, block, first, slot, 0, inside, ONE)
        scores = added_dot(rotary, tl.trans(dense_rows(k, tile, tl.arange(0, k.pad))), scores)
        p, sums, decay, top = weighed(
            scores, row_scale, unit, top, key, last, position - window, softcap,
            SOFTCAP, WINDOW, FOLDED, ENLARGED, False,
        )  # fmt: skip
        totals = totals * decay[:, None] + sums
        p = p.to(v.read.compute)
        if CODES and v.static is None:
            p = scaled(p, of_row)
        new = ()
        for i in tl.static_range(PARTS):
            part = parts[i * 2 % PARTS + i * 2 // PARTS] if HALVES else parts[i]  # halves alternate
            new = new + (added_dot(p, part, outs[i] * decay[:, None]),)
        outs = new

    out = all_side_by_side(outs, 0, PARTS)
    if CODES:
        out = out * UNIT
        if v.static is not None:
            out = out * tl.load(v.static)
    store_results(
        out, top - ENLARGED, tl.sum(totals, axis=1), out_ptr, lse_ptr, parts_ptr, part_lses_ptr, item, 0,
        height, sink_ptr, ROWS, 1, SHARE, v.dim, v.pad, 1, SINKS,
    )  # fmt: skip
