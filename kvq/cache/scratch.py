"""Dequantized rows of one layer for a whole batch, in scratch memory that all layers share."""

import torch
from torch import Tensor

from kvq.cache.kv_cache import KVCache
from kvq.cache.memory import allocate_bytes


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
        cache: KVCache,
        layer: int,
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
        kv = cache.layer(layer)
        shape = (tables.shape[0], kv.k.codes.shape[1], end - start)
        out = (
            self._take(0, torch.Size((*shape, kv.formats.k_head_dim)), dtypes[0]),
            self._take(1, torch.Size((*shape, kv.formats.v_head_dim)), dtypes[1]),
        )
        return cache.gather(layer, tables, start, end, unrotate=unrotate, out=out)

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
