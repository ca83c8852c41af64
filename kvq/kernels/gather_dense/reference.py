"""Reference `gather_dense`: the K and V of one sequence, dequantized, as dense tensors."""

from torch import Tensor

from kvq.formats import KVFormat
from kvq.kernels.codec import decode
from kvq.kernels.paged import PagedKV, PagedRows


def gather_dense(kv: PagedKV, table: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
    """Return K and V of the positions [start, end) of one sequence.

    `table`: int32 [blocks], the sequence's blocks in order. Returns fp32
    [kv_heads, end - start, k_head_dim] and [kv_heads, end - start, v_head_dim]; rows of rotated
    formats stay rotated. Slots outside [start, end) are not read into the result, whatever
    their bytes hold.
    """
    first, last = start // kv.block_size, -(-end // kv.block_size)
    blocks = table[first:last].long()
    skip = start - first * kv.block_size
    window = slice(skip, skip + end - start)
    return (
        _rows(kv.k, kv.formats.k, blocks, window),
        _rows(kv.v, kv.formats.v, blocks, window),
    )


def _rows(rows: PagedRows, fmt: KVFormat, blocks: Tensor, window: slice) -> Tensor:
    static = None if rows.static_scale is None else rows.static_scale[:, None, None]
    codes = _dense(rows.codes, blocks, window)
    scales = None if rows.scales is None else _dense(rows.scales, blocks, window)
    return decode(codes, scales, fmt, static)


def _dense(paged: Tensor, blocks: Tensor, window: slice) -> Tensor:
    """[num_blocks, kv_heads, block_size, row] -> [kv_heads, tokens, row] of the named blocks."""
    return paged[blocks].transpose(0, 1).flatten(1, 2)[:, window]
