"""Dense cache backend, the simplest backend: unquantized K and V as plain tensors, attention in PyTorch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvq.cache.blocks import BlockCache
from kvq.cache.memory import allocate_bytes, check_room
from kvq.cache.stores.base import Attended, LayerBatch, LayerStore
from kvq.errors import ConfigError
from kvq.formats import KVRecipe
from kvq.geometry import LayerGeometry
from kvq.kernels import AttentionOptions, SequenceBatch
from kvq.kernels.attend.reference import attend_rows
from kvq.kernels.codec import code_dtype
from kvq.layout import KVLayout


@dataclass(frozen=True, kw_only=True, eq=False)
class _DenseStore(LayerStore):
    """K and V of one layer in its group's blocks."""

    k: Tensor  # [num_blocks, block_size, kv_heads, dim]
    v: Tensor
    group: int

    def batch_of(self, batches: Sequence[SequenceBatch]) -> LayerBatch:
        return batches[self.group]

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        for rows, new in ((self.k, k), (self.v, v)):
            largest = torch.finfo(rows.dtype).max
            finite = torch.where(torch.isfinite(new), new, 0.0).float().clamp(-largest, largest)
            rows.flatten(0, 1)[slots] = finite.to(rows.dtype)
        return ~(torch.isfinite(k).all(dim=-1).all(dim=-1) & torch.isfinite(v).all(dim=-1).all(dim=-1))

    def attend(self, q: Tensor, batch: LayerBatch, options: AttentionOptions) -> Attended:
        assert isinstance(batch, SequenceBatch), "staged recipes are refused"

        def rows_of(table: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
            key, size = torch.arange(start, end, device=q.device), self.k.shape[1]
            slots = table[0, key // size].long() * size + key % size
            k, v = (x.flatten(0, 1)[slots].transpose(0, 1).float() for x in (self.k, self.v))
            return k, v

        out, lse = attend_rows(q.float(), rows_of, self.v.shape[-1], batch, options)
        return out.to(q.dtype), lse


class DenseCache(BlockCache):
    """Cache that stores all K and V in one floating-point dtype. It is an example for new backends."""

    def __init__(self, layout: KVLayout, *, num_blocks: list[int], device: torch.device) -> None:
        """Allocate `num_blocks` blocks of `layout.block_size` tokens per layer group.

        Raises:
            ConfigError: the recipe is not fp32, bf16 or fp16 for all layers.
            OutOfMemory: the blocks don't fit in memory; nothing stays allocated.
        """
        self._dtype = _common_dtype(layout.recipe)
        super().__init__(len(layout.groups))
        self._groups = [group.group.layers for group in layout.groups]
        self._block_size = layout.block_size
        self._device = device
        self._check_room(num_blocks)
        self.stores: dict[int, _DenseStore] = {}
        for group, count in enumerate(num_blocks):
            for layer in self._groups[group]:
                self.stores[layer.index] = self._allocate(layer, group, count)
            self._view_parts(group)

    def grow(self, num_blocks: list[int]) -> None:
        self._check_growth(num_blocks)
        self._check_room(num_blocks)
        for group, count in enumerate(num_blocks):
            for layer in self._groups[group]:
                larger = self._allocate(layer, group, count)
                old = self.stores[layer.index]
                for new, rows in zip((larger.k, larger.v), (old.k, old.v), strict=True):
                    new[: rows.shape[0]] = rows
                self.stores[layer.index] = larger
            self._view_parts(group)

    @torch.inference_mode(False)
    def _allocate(self, layer: LayerGeometry, group: int, count: int) -> _DenseStore:
        """Return a layer's zeroed blocks.

        The blocks are allocated outside inference mode, even while a model runs, to be writable in both
        modes.
        """

        def rows(dim: int) -> Tensor:
            shape = torch.Size((count, self._block_size, layer.kv_heads, dim))
            memory = allocate_bytes(shape.numel() * self._dtype.itemsize, self._device)
            return memory.view(self._dtype).view(shape)

        return _DenseStore(k=rows(layer.k_head_dim), v=rows(layer.v_head_dim), group=group)

    @torch.inference_mode(False)
    def _view_parts(self, group: int) -> None:
        stores = [self.stores[layer.index] for layer in self._groups[group]]
        tensors = [rows for store in stores for rows in (store.k, store.v)]
        self._parts[group] = [rows.flatten(1).view(torch.uint8) for rows in tensors]

    def _check_room(self, num_blocks: list[int]) -> None:
        tokens = [count * self._block_size for count in num_blocks]
        total = sum(
            n * layer.elements_per_token
            for n, layers in zip(tokens, self._groups, strict=True)
            for layer in layers
        )
        check_room(total * self._dtype.itemsize, self._device)


def _common_dtype(recipe: KVRecipe) -> torch.dtype:
    formats = {fmt for layer in recipe.layers for fmt in (layer.k, layer.v)}
    first = next(iter(formats))
    if len(formats) > 1 or not first.code.is_float or first.rotated:
        raise ConfigError(
            f"the dense cache backend stores fp32, bf16 or fp16 for all layers, got {recipe.name}; "
            f"use the kvq backend for quantized KV"
        )
    return code_dtype(first.code)
