"""Reference `gather_dense`: K and V for a range of positions, dequantized into dense tensors."""

from torch import Tensor

from kvq.formats import KVFormat
from kvq.kernels.codec import decode, decode_means, rotate
from kvq.kernels.paged import PagedKV, PagedRows


def gather_dense(
    kv: PagedKV,
    tables: Tensor,
    start: int,
    end: int,
    *,
    unrotate: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return K and V at positions [start, end) of every sequence.

    `tables`: integer [sequences, blocks], each sequence's blocks in order; entries outside [start, end) are
    not read. `unrotate`: whether rows of rotated formats are rotated back. `out`: tensors for the results,
    fp32, bf16 or fp16; by default new fp32 tensors. Returns [sequences, kv_heads, end - start, k_head_dim]
    and the same with v_head_dim. The bytes of slots outside [start, end) don't affect the result.
    """
    first, last = start // kv.block_size, -(-end // kv.block_size)
    skip = start - first * kv.block_size
    window = slice(skip, skip + end - start)
    out = kv.dense(len(tables), end - start) if out is None else out
    for i, table in enumerate(tables):  # one after another: dequantizing takes memory
        blocks = table[first:last].long()
        for into, rows, fmt in zip(out, (kv.k, kv.v), (kv.formats.k, kv.formats.v), strict=True):
            x = _rows(rows, fmt, blocks, window)
            into[i] = rotate(x) if unrotate and fmt.rotated else x
    return out


def _rows(rows: PagedRows, fmt: KVFormat, blocks: Tensor, window: slice) -> Tensor:
    static = None if rows.static_scale is None else rows.static_scale[:, None, None]
    codes = _dense(rows.codes, blocks, window)
    scales = None if rows.scales is None else _dense(rows.scales, blocks, window)
    x = decode(codes, scales, fmt, static)
    if rows.means is None:
        return x
    means = decode_means(rows.means[blocks], x.shape[-1]).transpose(0, 1)  # [kv_heads, blocks, dim]
    return x + means.repeat_interleave(rows.codes.shape[2], dim=1)[:, window]


def _dense(paged: Tensor, blocks: Tensor, window: slice) -> Tensor:
    """Gather `blocks` from [num_blocks, kv_heads, block_size, row] into [kv_heads, tokens, row]."""
    return paged[blocks].transpose(0, 1).flatten(1, 2)[:, window]
