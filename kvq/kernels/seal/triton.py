"""`seal` in Triton: one launch quantizes K and V of the blocks that have become old enough."""

from typing import Any, Literal

import triton
import triton.language as tl

from kvq.kernels.codec import channel, narrow
from kvq.kernels.gpu.encode import (
    finite_rows,
    half_minimum,
    quantize_groups,
    scale_byte,
    store_codes,
    turned_rows,
    write_rows,
)
from kvq.kernels.gpu.launch import Strides, opened, written_rows
from kvq.kernels.gpu.rows import CHANNEL, CHANNEL_INT8, INTERPRETED, narrow_scale
from kvq.kernels.gpu.stored import CENTER_STEP, MOST_PAIRED, channel_scale, shared_bits
from kvq.kernels.paged import PagedRows, StagedBatch, StagedKV

_TOKENS = 16  # of a block per program: few blocks are sealed in a step, and other kernels wait for them

_REACH = tl.constexpr(float(channel.INT8_REACH))
_ROUNDED_UP = tl.constexpr(narrow.ROUNDED_UP)


def seal(kv: StagedKV, batch: StagedBatch) -> None:
    """Do what the reference does, byte for byte; see reference.py. Tables are not checked.

    The blocks are determined from the lengths on the device, so that a graph may contain the launch; if the
    host knows that there are no such blocks, nothing is launched.
    """
    own, size = batch.recent, kv.sealed.block_size
    if not own.is_captured and not any(own.sealing(kv.exact.recent, size)):
        return
    most = max((-(-new // size) for new in own.query_lens), default=0)  # blocks of a sequence
    if not most:
        return
    most *= -(-size // _TOKENS)  # pieces
    read = own.device_lens(), *(x.tables for x in (own, batch.sealed, batch.sinks or own))
    fixed = _arguments(kv)
    # Not fused: a product and a sum rounded once would change codes.
    _seal_kernel[(most, len(own.query_lens), 2 * fixed["HEADS"])](
        *read, *(x.stride(0) for x in read), **fixed, enable_fp_fusion=False
    )


def _arguments(kv: StagedKV) -> dict[str, Any]:
    """Return the arguments that are the same at every step."""
    sinks = 0 if kv.sinks is None else kv.exact.sinks
    sizes = {"BLOCK_SIZE": kv.sealed.block_size, "HEADS": kv.recent.k.codes.shape[1], "TOKENS": _TOKENS}
    parts = {"k": _part("k", kv), "v": _part("v", kv)}
    return {**parts, "recent": kv.exact.recent, "SINKS": sinks, **sizes, "num_warps": 4}


def _part(part: Literal["k", "v"], kv: StagedKV) -> tuple[Any, ...]:
    """Return where K or V waits, where sinks are moved to (each with strides), and where it is sealed."""
    recent: PagedRows = getattr(kv.recent, part)
    sinks: PagedRows = recent if kv.sinks is None else getattr(kv.sinks, part)
    moved = Strides.of(sinks.codes)
    return (
        recent.codes,
        Strides.of(recent.codes),
        sinks.codes,
        moved,
        written_rows(part, kv.sealed).argument(),
    )


@triton.jit
def _rows(x_ptr, stride, slot, slots, col, rows):
    """Return rows of a block for encoding, fp32 [slots, columns]; rows from `slots` on are 0."""
    mask = (slot < slots)[:, None] & (col < rows.dim)[None, :]
    x, _ = finite_rows(
        tl.load(x_ptr + slot[:, None] * stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
    )
    return turned_rows(x, slot.shape[0], rows.pad, rows.rotated)


@triton.jit
def _added_one_by_one(total, x, ROWS: tl.constexpr):  # D141
    """Add the rows of x [ROWS, PAD] to `total` [PAD], from first to last; ROWS is a power of two."""
    if ROWS == 1:
        total += tl.reshape(x, (x.shape[1],))
    else:
        low, high = tl.split(tl.permute(tl.reshape(x, (2, ROWS // 2, x.shape[1])), (1, 2, 0)))
        total = _added_one_by_one(_added_one_by_one(total, low, ROWS // 2), high, ROWS // 2)
    return total


@triton.jit
def _mean(x_ptr, x_slot, to, is_stored, col, rows, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr):
    """Return the decoded mean of a block's rows, fp32 [1, columns]; one program per block stores the mean."""
    total = tl.zeros((rows.pad,), tl.float32)
    for first in range(0, BLOCK_SIZE, TOKENS):
        x = _rows(x_ptr, x_slot, first + tl.arange(0, TOKENS), BLOCK_SIZE, col, rows)
        total = _added_one_by_one(total, x, TOKENS)  # in this order, as the reference adds
    scales = (to + rows.dim // 2).to(tl.pointer_type(tl.int16), bitcast=True)
    mean, _ = finite_rows(tl.div_rn(total[None, :], float(BLOCK_SIZE)))  # sums may overflow
    own = tl.arange(0, 1)
    q, mean = quantize_groups(
        mean, scales, own, (own == 0) & is_stored, col, rows.dim, rows.mean_group, 4, 0.0
    )
    mask = ((col < rows.dim) & is_stored)[None, :]
    store_codes(to + col[None, :], q, mask, col, rows.dim, rows.pad, 4)
    return mean


@triton.jit
def _range(x_ptr, x_slot, col, rows, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr):
    """Return each channel's minimum and maximum in a block, fp32 [1, columns]."""
    low = tl.full((rows.pad,), float("inf"), tl.float32)
    high = tl.full((rows.pad,), float("-inf"), tl.float32)
    for first in range(0, BLOCK_SIZE, TOKENS):
        slot = first + tl.arange(0, TOKENS)
        x = _rows(x_ptr, x_slot, slot, BLOCK_SIZE, col, rows)
        own = (slot < BLOCK_SIZE)[:, None]
        low = tl.minimum(low, tl.min(tl.where(own, x, float("inf")), axis=0))
        high = tl.maximum(high, tl.max(tl.where(own, x, float("-inf")), axis=0))
    return low[None, :], high[None, :]


@triton.jit
def _write_channels(
    x, low, high, codes, scales, at, is_stored, inside, col,
    KIND: tl.constexpr, BITS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Store a block's rows, given the range `low` to `high` of each channel; one of the block's programs
    stores scales and offsets. See codec/channel.py."""
    mask = inside[:, None] & (col < DIM)[None, :]
    to, once = scales + col[None, :], ((col < DIM) & is_stored)[None, :]
    if KIND == CHANNEL_INT8:
        center = low * 0.5 + high * 0.5
        reach = tl.div_rn(high * 0.5 - low * 0.5, _REACH)
        byte = scale_byte(tl.maximum(reach, tl.div_rn(tl.abs(center), 127.0 * CENTER_STEP)), True)
        scale = narrow_scale(byte)
        steps = tl.floor(tl.div_rn(center, scale * CENTER_STEP) + 0.5)
        steps = tl.minimum(tl.maximum(steps, -127.0), 127.0)
        q = tl.floor(tl.div_rn(x - steps * CENTER_STEP * scale, scale) + 0.5)
        tl.store(codes + at, tl.minimum(tl.maximum(q, -127.0), 127.0).to(tl.int8), mask=mask)
        tl.store(to + DIM, steps.to(tl.int8).to(tl.uint8, bitcast=True), mask=once)
    else:
        minimum = half_minimum(low)
        levels: tl.constexpr = float((1 << BITS) - 1)
        offset = minimum.to(tl.float32)
        byte = scale_byte(tl.div_rn(high - offset, levels), BITS >= _ROUNDED_UP)
        partner = tl.maximum(DIM - 1 - col, 0)[None, :]
        own = shared_bits(byte, tl.gather(byte, partner, axis=1), BITS)
        q = tl.floor(tl.div_rn(x - offset, channel_scale(byte, own, BITS)) + 0.5)
        q = tl.minimum(tl.maximum(q, 0.0), ((1 << own) - 1).to(tl.float32)).to(tl.int32)
        if BITS <= MOST_PAIRED:
            q = q | (tl.gather(q, tl.broadcast_to(partner, q.shape), axis=1) << own)
            store_codes(codes + at, q.to(tl.uint8), mask, col, DIM // 2, PAD, 2 * BITS)
        else:
            store_codes(codes + at, q.to(tl.uint8), mask, col, DIM, PAD, BITS)
        halves = (scales + DIM).to(tl.pointer_type(tl.float16), bitcast=True)
        tl.store(halves + col[None, :], minimum, mask=once)
    tl.store(to, byte.to(tl.uint8), mask=once)


@triton.jit(do_not_specialize=["recent_stride", "sealed_stride", "sinks_stride"])
def _seal_kernel(
    lens_ptr, recent_tables, sealed_tables, sinks_tables,
    lens_row, recent_stride, sealed_stride, sinks_stride, k, v, recent,
    HEADS: tl.constexpr, SINKS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Seal blocks. Grid: (pieces of blocks that new tokens may make old enough, sequences, KV heads of K,
    then of V). `k`, `v`: see `_part`."""
    PIECES: tl.constexpr = (BLOCK_SIZE + TOKENS - 1) // TOKENS
    sequence, head = tl.program_id(1), tl.program_id(2).to(tl.int64) % HEADS
    new = tl.load(lens_ptr + lens_row + sequence)
    context = tl.load(lens_ptr + 2 * lens_row + sequence)
    index = tl.maximum(context - new - recent, 0) // BLOCK_SIZE + tl.program_id(0) // PIECES
    if index >= tl.maximum(context - recent, 0) // BLOCK_SIZE:
        return
    wide = sequence.to(tl.int64)
    source = tl.load(recent_tables + wide * recent_stride + index).to(tl.int64)
    is_sink = index * BLOCK_SIZE < SINKS
    if is_sink:
        target = tl.load(sinks_tables + wide * sinks_stride + index).to(tl.int64)
    else:
        target = tl.load(sealed_tables + wide * sealed_stride + index).to(tl.int64)
    piece = tl.program_id(0) % PIECES
    if tl.program_id(2) < HEADS:
        _seal_piece(piece, source, target, is_sink, head, k[0], k[1], k[2], k[3], k[4], BLOCK_SIZE, TOKENS)
    else:
        _seal_piece(piece, source, target, is_sink, head, v[0], v[1], v[2], v[3], v[4], BLOCK_SIZE, TOKENS)


@triton.jit
def _seal_piece(
    piece, source, target, is_sink, head, from_ptr, x, to_ptr, y, rows,
    BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Seal a piece of a block of K or V, or copy it if it is a sink. `x`, `y`: strides of the blocks that are
    read, and of the blocks to which sinks are moved."""
    if INTERPRETED:
        rows = opened(rows)
    slot, col = piece * TOKENS + tl.arange(0, TOKENS), tl.arange(0, rows.pad)
    from_ptr += source * x.block + head * x.head
    if is_sink:
        to_ptr += target * y.block + head * y.head
        mask = (slot < BLOCK_SIZE)[:, None] & (col < rows.dim)[None, :]
        plain = tl.load(from_ptr + slot[:, None] * x.slot + col[None, :], mask=mask)
        tl.store(to_ptr + slot[:, None] * y.slot + col[None, :], plain, mask=mask)
    else:
        codes, scales, means = rows.code_strides, rows.scale_strides, rows.mean_strides
        values = _rows(from_ptr, x.slot, slot, BLOCK_SIZE, col, rows)
        if rows.mean_group > 0:
            to = rows.means + target * means.block + head * means.head
            values -= _mean(from_ptr, x.slot, to, piece == 0, col, rows, BLOCK_SIZE, TOKENS)
        codes_at = target * codes.block + head * codes.head + slot * codes.slot
        scales_at = target * scales.block + head * scales.head
        if rows.kind >= CHANNEL:
            low, high = _range(from_ptr, x.slot, col, rows, BLOCK_SIZE, TOKENS)
            _write_channels(
                values, low, high, rows.codes, rows.scales + scales_at, codes_at[:, None] + col[None, :],
                piece == 0, slot < BLOCK_SIZE, col, rows.kind, rows.bits, rows.dim, rows.pad,
            )  # fmt: skip
        else:
            scales_at = scales_at + slot * scales.slot
            write_rows(values, rows, codes_at, scales_at, slot * 0 + head, col, slot < BLOCK_SIZE)
