"""The simplest cache backend: unquantized K and V as plain tensors, attended to in plain PyTorch."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kvq.blockmgr.orders import Order, SwapIn
from kvq.cache.backend import carry_out
from kvq.cache.memory import allocate_bytes, check_room
from kvq.errors import ConfigError
from kvq.formats import KVRecipe
from kvq.geometry import LayerGeometry
from kvq.kernels import AttentionOptions, SequenceBatch
from kvq.kernels.codec import code_dtype
from kvq.layout import KVLayout


class DenseCache:
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
        self._groups = [group.group.layers for group in layout.groups]
        self._block_size = layout.block_size
        self._device = device
        self._host: dict[tuple[int, int], Tensor] = {}  # (group, slot) -> bytes
        self.group_of = {x.index: g for g, layers in enumerate(self._groups) for x in layers}
        self._check_room(num_blocks)
        self._rows = {  # layer -> K and V
            layer.index: self._allocate(layer, count)
            for layers, count in zip(self._groups, num_blocks, strict=True)
            for layer in layers
        }
        self.num_blocks = list(num_blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of all K and V tensors."""
        return sum(k.nbytes + v.nbytes for k, v in self._rows.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of the blocks that are swapped out."""
        return sum(content.numel() for content in self._host.values())

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
        """Causal attention, one sequence after the other; see `CacheBackend.attend`."""
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

    def copy(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks one after another."""
        for rows in self._tensors(group):
            for source, target in pairs:
                rows[target] = rows[source]

    def scrub(self, group: int, blocks: Sequence[int]) -> None:
        """Zero blocks."""
        for rows in self._tensors(group):
            rows[list(blocks)] = 0

    def swap_out(self, group: int, block: int, slot: int) -> None:
        """Keep a copy of a block in host memory."""
        self._host[group, slot] = self.read_block(group, block)

    def swap_in(self, group: int, slot: int, block: int) -> bool:
        """Bring a block back; False, and a zeroed block, if the slot is empty."""
        content = self._host.get((group, slot))
        if content is None:
            self.scrub(group, [block])
            return False
        self.write_block(group, block, content)
        return True

    def carry_out(self, orders: Sequence[Order]) -> list[SwapIn]:
        """Carry out orders one after another; returns the swap-ins that failed."""
        return carry_out(self, orders)

    def read_block(self, group: int, block: int) -> Tensor:
        """A block's bytes on the host, uint8: K and V of layer after layer."""
        return torch.cat([rows[block].flatten().view(torch.uint8) for rows in self._tensors(group)]).cpu()

    def write_block(self, group: int, block: int, content: Tensor) -> None:
        """Overwrite a block with what `read_block` gave."""
        tensors = self._tensors(group)
        pieces = content.to(self._device).split([rows[0].nbytes for rows in tensors])
        for rows, piece in zip(tensors, pieces, strict=True):
            rows[block].flatten().view(torch.uint8).copy_(piece)

    def grow(self, num_blocks: list[int]) -> None:
        """Enlarge the tensors, one layer after the other; see `CacheBackend.grow`."""
        if any(new < old for new, old in zip(num_blocks, self.num_blocks, strict=True)):
            raise ConfigError(f"pools can only grow, from {self.num_blocks} blocks, got {num_blocks}")
        self._check_room(num_blocks)
        for group, count in enumerate(num_blocks):
            for layer in self._groups[group]:
                larger = self._allocate(layer, count)
                for new, old in zip(larger, self._rows[layer.index], strict=True):
                    new[: old.shape[0]] = old
                self._rows[layer.index] = larger
            self.num_blocks[group] = count

    def close(self) -> None:
        """Forget the blocks that are swapped out."""
        self._host.clear()

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

    def _tensors(self, group: int) -> list[Tensor]:
        return [rows for layer in self._groups[group] for rows in self._rows[layer.index]]

    def _check_room(self, num_blocks: list[int]) -> None:
        elements = [sum(layer.elements_per_token for layer in layers) for layers in self._groups]
        tokens = [count * self._block_size for count in num_blocks]
        total = sum(n * per_token for n, per_token in zip(tokens, elements, strict=True))
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
