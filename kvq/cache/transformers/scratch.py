"""Scratch memory for one layer's dequantized rows of a batch, and torch's attention over these rows."""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kvq.cache.kv_cache import KVCache
from kvq.cache.memory import allocate_bytes
from kvq.kernels import AttentionOptions, SequenceBatch
from kvq.kernels.codec import rotate_by_product
from kvq.kernels.paged import Rows


class DenseScratch:
    """Scratch memory for the K and V of one layer of a cache. The next layer overwrites its content."""

    def __init__(self, cache: KVCache, device: torch.device) -> None:
        self._cache = cache
        self._device = device
        self._memory = [torch.empty(0, dtype=torch.uint8, device=device)] * 2  # K, V

    def __deepcopy__(self, memo: dict[int, Any]) -> "DenseScratch":
        """Return empty scratch memory for a copy of the cache."""
        return DenseScratch(copy.deepcopy(self._cache, memo), self._device)

    @property
    def nbytes(self) -> int:
        return sum(memory.numel() for memory in self._memory)

    def gather(
        self,
        layer: int,
        tables: Tensor,
        positions: range,
        *,
        dtypes: tuple[torch.dtype, torch.dtype],
        unrotate: bool,
    ) -> Rows:
        """Return K and V at `positions` of every sequence.

        `tables`: integer [batch, blocks]; `unrotate`: whether to undo the rotation of rotated formats.
        Returns [batch, kv_heads, positions, dim] in `dtypes`, valid until the next call.
        """
        kv = self._cache.layer(layer)
        shape = (tables.shape[0], kv.k.codes.shape[1], len(positions))
        out = (
            self._take(0, torch.Size((*shape, kv.formats.k_head_dim)), dtypes[0]),
            self._take(1, torch.Size((*shape, kv.formats.v_head_dim)), dtypes[1]),
        )
        return self._cache.gather(layer, tables, positions.start, positions.stop, unrotate=unrotate, out=out)

    def attend(self, layer: int, q: Tensor, batch: SequenceBatch, options: AttentionOptions) -> Tensor | None:
        """Compute causal attention of each row's last tokens, without softcap or sinks.

        `q`: [batch, q_heads, count, k_head_dim]. Returns [batch, count, q_heads, v_head_dim]. A row's new
        tokens are the last of its `count` queries; earlier queries are padding, and their output is zero.
        Stored rows stay rotated; Q is rotated instead, and the output is rotated back. Returns None for
        windows over rows of unequal length, where some rows have released their oldest blocks.
        """
        count, lengths, formats = q.shape[2], batch.context_lens, self._cache.layer(layer).formats
        window, longest, even = options.window or options.chunk, max(lengths), len(set(lengths)) == 1
        if window is not None and not even:
            return None
        start = options.oldest(longest - count)
        dtypes = (q.dtype, q.dtype)
        k, v = self.gather(layer, batch.tables, range(start, longest), dtypes=dtypes, unrotate=False)
        for i, length in enumerate(lengths):
            k[i, :, length - start :] = 0  # slots past a row's end may decode to NaN
            v[i, :, length - start :] = 0
        if formats.k.rotated:
            q = rotate_by_product(q).to(q.dtype)  # the rotation is its own inverse
        sees_all = even and count == 1 and window is None
        plain = even and start == 0 and count == longest and (window is None or window >= longest)
        mask = None if sees_all or plain else ~_hidden(lengths, count, start, options, q.device)
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=plain, scale=options.scale, enable_gqa=True
        )
        if formats.v.rotated:
            out = rotate_by_product(out).to(q.dtype)
        out = out.transpose(1, 2)
        if any(some != count for some in batch.query_lens):
            hidden = torch.arange(count)[None] < torch.tensor([[count - some] for some in batch.query_lens])
            out = out.masked_fill(hidden[..., None, None].to(q.device), 0.0)
        return out

    def _take(self, part: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return uninitialized memory for K (0) or V (1). The memory always grows by at least a quarter."""
        needed, held = shape.numel() * dtype.itemsize, self._memory[part].numel()
        if needed > held:
            self._memory[part] = self._memory[part].new_empty(0)  # old memory is freed before new is taken
            room = -(-(needed + (needed // 4 if held else 0)) // 64) * 64
            self._memory[part] = allocate_bytes(room, self._device, purpose="KvqCache's scratch memory")
        return self._memory[part][:needed].view(dtype).view(shape)


def _hidden(
    lengths: tuple[int, ...], count: int, start: int, options: AttentionOptions, device: torch.device
) -> Tensor:
    """Return bool [batch or 1, 1, count, keys]: True where a query can't see a key. Keys begin at `start`."""
    ends = torch.tensor(lengths[:1] if len(set(lengths)) == 1 else lengths, device=device)
    query = ends[:, None, None] - count + torch.arange(count, device=device)[:, None]  # [rows, count, 1]
    key = torch.arange(start, max(lengths), device=device)
    return options.hides(query, key)[:, None]
