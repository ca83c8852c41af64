"""Dequantized rows of one layer for a whole batch, in scratch memory that all layers share."""

import torch
from torch import Tensor

from kvq.cache.int4 import decode_int4, has_fast_int8, is_power_of_two, unrotate_int4, unrotated
from kvq.cache.memory import allocate_bytes
from kvq.formats import Code, Grouped, KVFormat
from kvq.kernels import PagedKV, PagedRows
from kvq.kernels.codec import decode

# Elements dequantized at a time: on a CPU what stays in its cache, elsewhere few launches.
_TILE = {"cpu": 1 << 20}
_TILE_ELSEWHERE = 1 << 24


class DenseScratch:
    """Memory for one layer's K and V; what it holds is overwritten by the next layer's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = [torch.empty(0, dtype=torch.uint8, device=device)] * 2  # K, V

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(memory.numel() for memory in self._memory)

    def gather(
        self,
        kv: PagedKV,
        tables: Tensor,
        start: int,
        end: int,
        *,
        dtypes: tuple[torch.dtype, torch.dtype],
        unrotate: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return K and V of the positions [start, end) of every sequence.

        `tables`: integer [batch, blocks]; `unrotate`: whether rotated formats are rotated back.
        Returns [batch, kv_heads, end - start, dim] in `dtypes`, valid until the next call.
        """
        first, last = start // kv.block_size, -(-end // kv.block_size)
        blocks = tables[:, first:last].long()
        skip = start - first * kv.block_size
        kept = slice(skip, skip + end - start)
        dims = (kv.formats.k_head_dim, kv.formats.v_head_dim)
        parts = zip((kv.k, kv.v), (kv.formats.k, kv.formats.v), dims, dtypes, strict=True)
        k, v = (
            _fill(self._room(i, rows, blocks, dim, dtype), rows, fmt, blocks, unrotate)[:, :, kept]
            for i, (rows, fmt, dim, dtype) in enumerate(parts)
        )
        return k, v

    def halves(self, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Two fp32 tensors of that shape, in the memory that `gather` uses."""
        low, high = (self._take(part, shape, torch.float32) for part in (0, 1))
        return low, high

    def _room(self, part: int, rows: PagedRows, blocks: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        """[batch, kv_heads, blocks, block_size, dim]."""
        _, heads, size, _ = rows.codes.shape
        shape = (blocks.shape[0], heads, blocks.shape[1], size, dim)
        return self._take(part, torch.Size(shape), dtype)

    def _take(self, part: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Uninitialized memory of K (0) or V (1); it grows by a quarter at least."""
        needed = shape.numel() * dtype.itemsize
        if needed > self._memory[part].numel():
            spare = needed // 4 if self._memory[part].numel() else 0
            self._memory[part] = torch.empty(
                0, dtype=torch.uint8, device=self._device
            )  # the old bytes go before the new ones come
            room = -(-(needed + spare) // 64) * 64
            self._memory[part] = allocate_bytes(room, self._device, purpose="KvqCache's scratch memory")
        return self._memory[part][:needed].view(dtype).view(shape)


def _fill(room: Tensor, rows: PagedRows, fmt: KVFormat, blocks: Tensor, unrotate: bool) -> Tensor:
    """Dequantize `blocks` [batch, blocks] into `room`; returns [batch, kv_heads, tokens, dim]."""
    batch, heads, num_blocks, size, dim = room.shape
    by_block = room.transpose(1, 2)  # [batch, blocks, kv_heads, block_size, dim]
    tile = max(1, _TILE.get(room.device.type, _TILE_ELSEWHERE) // (heads * size * dim))  # blocks
    wide, tall = min(tile, num_blocks), max(1, tile // num_blocks)  # blocks of a row, rows
    for row in range(0, batch, tall):
        for at in range(0, num_blocks, wide):
            some = (slice(row, row + tall), slice(at, at + wide))
            _dequantize(by_block[some], rows, fmt, blocks[some], unrotate and fmt.rotated)
    return room.flatten(2, 3)


def _dequantize(out: Tensor, rows: PagedRows, fmt: KVFormat, blocks: Tensor, unrotate: bool) -> None:
    """Put the rows of some blocks into `out` [*blocks.shape, kv_heads, block_size, dim]."""
    codes = _picked(rows.codes, blocks)
    scales = None if rows.scales is None else _picked(rows.scales, blocks)
    if fmt.code is Code.INT4 and isinstance(fmt.scale, Grouped):
        assert scales is not None, f"{fmt.name} stores scales"
        x = out if out.dtype is torch.float32 else torch.empty(out.shape, device=out.device)
        if unrotate and has_fast_int8(out) and is_power_of_two(out.shape[-1]):
            unrotate_int4(x, codes, scales)
            unrotate = False
        else:
            decode_int4(x, codes, scales)
    elif fmt.code.is_float:
        x = codes
    else:
        static = None if rows.static_scale is None else rows.static_scale[:, None, None]
        x = decode(codes, scales, fmt, static)
    if unrotate:
        x = unrotated(x)
    if x is not out:
        out.copy_(x)


def _picked(paged: Tensor, blocks: Tensor) -> Tensor:
    """[num_blocks, kv_heads, block_size, row] -> [*blocks.shape, kv_heads, block_size, row]."""
    return paged.index_select(0, blocks.flatten()).view(*blocks.shape, *paged.shape[1:])
