"""The simplest cache backend: unquantized K and V as plain tensors, attended to in plain PyTorch."""

from pathlib import Path

import torch
from torch import Tensor

from kvq.cache.blocks import BlockCache
from kvq.cache.memory import allocate_bytes, check_room
from kvq.errors import ConfigError
from kvq.formats import KVRecipe
from kvq.geometry import LayerGeometry
from kvq.kernels import AttentionOptions, SequenceBatch
from kvq.kernels.codec import code_dtype
from kvq.layout import KVLayout


class DenseCache(BlockCache):
    """K and V of every layer in blocks of one floating-point dtype; an example to start from."""

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_blocks: list[int],
        device: torch.device,
        host_slots: list[int] | None = None,
        swap_folder: str | Path | None = None,
    ) -> None:
        """Allocate `num_blocks` blocks of `layout.block_size` tokens per layer group.

        `host_slots`: accepted with any counts; blocks swapped out stay in host memory.

        Raises:
            ConfigError: a recipe other than fp32, bf16 or fp16 for all layers, or a swap folder.
            OutOfMemory: the blocks don't fit; nothing stays allocated.
        """
        self._dtype = _common_dtype(layout.recipe)
        if swap_folder is not None:
            raise ConfigError(
                f"the dense cache backend swaps to memory only, got swap_folder={str(swap_folder)!r}; "
                f"leave it out, or use the kvq backend"
            )
        super().__init__(len(layout.groups), _InMemory())
        self._groups = [group.group.layers for group in layout.groups]
        self._block_size = layout.block_size
        self._device = device
        self.group_of = {x.index: g for g, layers in enumerate(self._groups) for x in layers}
        self._check_room(num_blocks)
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> K and V
        for group, count in enumerate(num_blocks):
            for layer in self._groups[group]:
                self._rows[layer.index] = self._allocate(layer, count)
            self._view_parts(group)

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        """Store rows [tokens, kv_heads, dim]; returns bool [tokens], True where one is not finite."""
        largest = torch.finfo(self._dtype).max
        for rows, new in zip(self._rows[layer], (k, v), strict=True):
            finite = torch.where(torch.isfinite(new), new, 0.0).float().clamp(-largest, largest)
            rows.flatten(0, 1)[slots] = finite.to(self._dtype)
        return ~(torch.isfinite(k).all(dim=-1).all(dim=-1) & torch.isfinite(v).all(dim=-1).all(dim=-1))

    def attend(
        self, layer: int, q: Tensor, batch: SequenceBatch, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        k_rows, v_rows = self._rows[layer]
        out = q.new_empty(*q.shape[:2], v_rows.shape[-1])
        lse = torch.empty(q.shape[:2], device=q.device)
        at = 0
        for table, new, context in zip(batch.tables, batch.query_lens, batch.context_lens, strict=True):
            query = torch.arange(context - new, context, device=q.device)[:, None]  # positions
            oldest = options.oldest(context - new)
            key = torch.arange(oldest, context, device=q.device)
            slots = table[key // self._block_size].long() * self._block_size + key % self._block_size
            k, v = (x.flatten(0, 1)[slots].transpose(0, 1).float() for x in (k_rows, v_rows))
            rows = slice(at, at + new)
            one_out, lse[rows] = _attend_one(
                q[rows].float() * options.scale, k, v, options.hides(query, key), options
            )
            out[rows] = one_out.to(q.dtype)
            at += new
        return out, lse

    def grow(self, num_blocks: list[int]) -> None:
        self._check_growth(num_blocks)
        self._check_room(num_blocks)
        for group, count in enumerate(num_blocks):
            for layer in self._groups[group]:
                larger = self._allocate(layer, count)
                for new, old in zip(larger, self._rows[layer.index], strict=True):
                    new[: old.shape[0]] = old
                self._rows[layer.index] = larger
            self._view_parts(group)

    @torch.inference_mode(False)
    def _allocate(self, layer: LayerGeometry, count: int) -> tuple[Tensor, Tensor]:
        """Zeroed K and V of one layer, [num_blocks, block_size, kv_heads, dim] each.

        Made as in normal mode, even while a model runs: else they could not be written outside it.
        """

        def rows(dim: int) -> Tensor:
            shape = torch.Size((count, self._block_size, layer.kv_heads, dim))
            memory = allocate_bytes(shape.numel() * self._dtype.itemsize, self._device)
            return memory.view(self._dtype).view(shape)

        return rows(layer.k_head_dim), rows(layer.v_head_dim)

    @torch.inference_mode(False)
    def _view_parts(self, group: int) -> None:
        tensors = [rows for layer in self._groups[group] for rows in self._rows[layer.index]]
        self._parts[group] = [rows.flatten(1).view(torch.uint8) for rows in tensors]

    def _check_room(self, num_blocks: list[int]) -> None:
        tokens = [count * self._block_size for count in num_blocks]
        total = sum(
            n * layer.elements_per_token
            for n, layers in zip(tokens, self._groups, strict=True)
            for layer in layers
        )
        check_room(total * self._dtype.itemsize, self._device)


class _InMemory:
    """Swapped-out blocks by group and slot."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int], Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(map(Tensor.numel, self._blocks.values()))

    def put(self, group: int, slot: int, content: Tensor) -> None:
        self._blocks[group, slot] = content

    def get(self, group: int, slot: int) -> Tensor | None:
        return self._blocks.get((group, slot))

    def close(self) -> None:
        self._blocks.clear()


def _common_dtype(recipe: KVRecipe) -> torch.dtype:
    formats = {fmt for layer in recipe.layers for fmt in (layer.k, layer.v)}
    first = next(iter(formats))
    if len(formats) > 1 or not first.code.is_float or first.rotated:
        raise ConfigError(
            f"the dense cache backend stores fp32, bf16 or fp16 for all layers, got {recipe.name}; "
            f"use the kvq backend for quantized KV"
        )
    return code_dtype(first.code)


def _attend_one(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Scaled `q` [new, q_heads, dim] over `k`, `v` [kv_heads, keys, dim]; `hidden` [new, keys]."""
    heads = q.shape[1] // k.shape[0]
    k, v = k.repeat_interleave(heads, dim=0), v.repeat_interleave(heads, dim=0)
    scores = options.capped(q.transpose(0, 1) @ k.transpose(1, 2))  # [q_heads, new, keys]
    scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(dim=-1)  # [q_heads, new]
    if options.sinks is not None:
        lse = torch.logaddexp(lse, options.sinks.float()[:, None])
    out = torch.exp(scores - lse[..., None]) @ v
    return out.transpose(0, 1), lse.transpose(0, 1)
