"""Rows of a batch as sequences in separate pools: the storage of KvqCache, without transformers."""

import torch
from torch import Tensor

from kvq.blockmgr import BlockManager, Sequence
from kvq.cache.kv_cache import KVCache
from kvq.cache.transformers.recent import RecentRows, put_over
from kvq.cache.transformers.scratch import DenseScratch
from kvq.errors import OutOfBlocks, RequestError
from kvq.kernels import AttentionOptions, SequenceBatch
from kvq.kernels.attend.options import parts_of
from kvq.kernels.paged import Rows
from kvq.layout import KVLayout

_GROWTH = 32  # a full pool grows by at least 1 / _GROWTH


class BatchRows:
    """Storage of a batch: one sequence per row, which all grow together, and their blocks.

    `length` counts the tokens of every row as transformers sees them, including padding; row i stores its
    last `length - padding[i]` tokens.
    """

    def __init__(
        self, layout: KVLayout, *, batch: int, max_tokens: int | None, device: torch.device, backend: str
    ) -> None:
        """Start `batch` empty rows with memory for `max_tokens` tokens per row, or for one block per row.

        Raises:
            OutOfMemory: the pools don't fit in memory.
        """
        self.layout = layout
        self.max_tokens = max_tokens
        self.device = device
        self.blocks = KVCache(layout, num_blocks=self._least_blocks(batch), device=device, backend=backend)
        self.manager = BlockManager(
            num_blocks=self._least_blocks(batch), block_size=layout.block_size, **layout.holding
        )
        self.scratch = DenseScratch(self.blocks, device)
        kept = layout.recipe.exact.recent + layout.block_size
        self.recent = RecentRows(kept) if layout.recipe.is_staged else None
        self._prefers_dense = [
            backend == "auto" and self.blocks.backend_of("attend", layer.index) == "reference"
            for layer in layout.geometry.layers
        ]
        self.sequences: list[Sequence] = []
        self.start(batch)

    @property
    def nbytes(self) -> int:
        """Bytes used for K and V: the pools, and unquantized rows of recent tokens."""
        return self.blocks.nbytes + (0 if self.recent is None else self.recent.nbytes)

    @property
    def batch(self) -> int:
        return len(self.sequences)

    def start(self, batch: int) -> None:
        """Drop all rows, and start `batch` empty rows in the same pools."""
        for sequence in self.sequences:
            self.manager.free(sequence)
        if self.recent is not None:
            self.recent.clear()
        self._grow_to(self._least_blocks(batch))
        self.sequences = [self.manager.new_sequence() for _ in range(batch)]
        self.length = 0
        self.padding = [0] * batch
        with torch.inference_mode(False):  # otherwise, it could not be written outside inference mode
            self.bad_rows = torch.zeros(batch, dtype=torch.bool, device=self.device)
        self.batches: list[SequenceBatch] = []  # of the last step, by layer group
        self._place: Tensor | None = None  # places of its tokens in [batch * count]; None if unpadded
        self._may_copy = False

    def append(self, count: int, padding: list[int] | None = None) -> None:
        """Allocate slots for `count` more tokens in every row, except the first `padding[i]` tokens of row i.

        Without `padding`, padding tokens are stored like other tokens.

        Raises:
            RequestError: a row exceeds `max_tokens`, or has padding after its first token.
            OutOfMemory: the pools can't grow. After either error, nothing is changed.
        """
        if padding is None and any(self.padding):
            raise RequestError(
                "the left padding was not stored under attn_implementation='kvq', so another attention "
                "can't go on from it; keep 'kvq', or reset() the cache"
            )
        padding = padding or self.padding
        total = self.length + count
        if self.max_tokens is not None and total > self.max_tokens:
            raise RequestError(
                f"the cache was made for max_tokens={self.max_tokens} per row, this step needs {total}; "
                f"make one with a larger max_tokens, or without it, to let it grow"
            )
        counts = [total - pad - s.length for pad, s in zip(padding, self.sequences, strict=True)]
        has_moved = [
            bool(s.length) and new != old
            for new, old, s in zip(padding, self.padding, self.sequences, strict=True)
        ]
        if any(has_moved) or any(new < 0 or new > count for new in counts):
            raise RequestError(
                f"the padding changed from {self.padding} to {padding} tokens after {self.length} tokens; "
                f"pad on the left, and pass the attention_mask of the whole context in every call"
            )
        work = [(s, new) for s, new in zip(self.sequences, counts, strict=True) if new]
        self._make_room(work)
        slots = self.manager.append(work)
        self.blocks.carry_out(self.manager.take_orders())
        self._may_copy = False
        self.length, self.padding, self._count = total, list(padding), count
        lengths = [sequence.length for sequence in self.sequences]
        self.batches = [
            SequenceBatch.of([s.tables[group] for s in self.sequences], own, counts, lengths, self.device)
            for group, own in enumerate(slots)
        ]
        self._place = self._places(counts) if any(new != count for new in counts) else None

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store one layer's new rows, [batch, kv_heads, count, dim]; see `check_finite`.

        If tokens have to wait until their block is full, `attend` and `dense` store them instead.
        """
        rows = self._packed(k), self._packed(v)
        if self.recent is not None:
            bad = torch.stack([~x.isfinite().flatten(1).all(1) for x in rows]).any(0)
        else:
            store = self.blocks.stores[layer]
            bad = store.write(*rows, store.batch_of(self.batches).slots)
        self.bad_rows |= self._unpacked(bad).any(dim=1)

    def attend(self, layer: int, q: Tensor, new: tuple[Tensor, Tensor], options: AttentionOptions) -> Tensor:
        """Attend over one layer's blocks. Call `write` first.

        `q`: [batch, q_heads, count, k_head_dim]; `new`: the step's own K and V, just written. Returns
        [batch, count, q_heads, v_head_dim], zero where a token is padding. If only the reference kernel is
        available, blocks are dequantized into `scratch` for torch's own attention, provided that torch
        supports the layer.
        """
        own = self.layout.geometry.layers[layer]
        options = options.reaching(own.window, is_chunked=own.is_chunked)
        batch, exact = self.batches[self.blocks.group_of[layer]], self._write_filled(layer, new)
        store = self.blocks.stores[layer]
        if exact is not None:
            return self._unpacked(store.attend_with(self._packed(q), exact, batch, options)[0])
        if self._prefers_dense[layer] and options.softcap is None and options.sinks is None:
            out = self.scratch.attend(layer, q, batch, options)
            if out is not None:
                return out
        return self._unpacked(store.attend(self._packed(q), batch, options)[0])

    def dense(self, layer: int, start: int, new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return K and V of a layer from position `start` on: [batch, kv_heads, tokens, dim].

        `new`: the step's own K and V, just written; the result has the same dtypes. The result is in
        `scratch`, and the next layer's result overwrites it. Rows must not have padding.
        """
        exact = self._write_filled(layer, new)
        tables = self.batches[self.blocks.group_of[layer]].tables
        dtypes = (new[0].dtype, new[1].dtype)
        positions = range(start, self.length)
        k, v = self.scratch.gather(layer, tables, positions, dtypes=dtypes, unrotate=True)
        if exact is not None:
            old, *_ = parts_of(self.layout.exact, self.layout.block_size)
            first = max(start, old.edge(self.length - self._count))  # first that its first token sees exactly
            for dense, rows in zip((k, v), exact, strict=True):
                put_over(dense[:, :, first - start :], rows)
        return k, v

    def check_finite(self) -> None:
        """Raise RequestError if K or V of any row contained NaN or infinity. Synchronizes the device."""
        if bool(self.bad_rows.any()):
            rows = self.bad_rows.nonzero().flatten().tolist()
            raise RequestError(
                f"K or V of batch rows {rows} held NaN or infinity; the weights or the dtype overflow, "
                f"try dtype fp32. The rows can't be used any more: reset() the cache, or drop them with "
                f"batch_select_indices"
            )

    def commit(self) -> None:
        """Commit the appended tokens. Sliding-window groups release blocks that no later token can see."""
        for sequence in self.sequences:
            self.manager.commit(sequence)

    def truncate(self, count: int) -> None:
        """Drop the last `count` tokens of every row.

        Raises:
            RequestError: blocks that the shortened rows need were released; nothing was changed.
        """
        length = self.length - count
        padding = [min(pad, length) for pad in self.padding]
        shorter = [(s, min(s.length, length - pad)) for s, pad in zip(self.sequences, padding, strict=True)]
        if not all(self.manager.can_truncate(sequence, tokens) for sequence, tokens in shorter):
            raise RequestError(
                f"can't drop {count} tokens: a window that slid on gave back what is seen there; call "
                f"activate_past_recording() before the forward passes that crop() may undo, and crop once"
            )
        self.length, self.padding = length, padding
        for sequence, tokens in shorter:
            if tokens < sequence.length:
                self.manager.truncate(sequence, tokens)
        if self.recent is not None:
            self.recent.truncate(count)
            self._refill(self.recent)

    def select(self, indices: list[int]) -> None:
        """Replace each row i with the former row `indices[i]`. Rows with equal indices share their blocks."""
        self.commit()
        kept = set(indices)
        for index, sequence in enumerate(self.sequences):
            if index not in kept:
                self.manager.free(sequence)
        taken: set[int] = set()
        rows = []
        for index in indices:
            sequence = self.sequences[index]
            rows.append(self.manager.fork(sequence) if index in taken else sequence)
            taken.add(index)
        self._may_copy = self._may_copy or len(taken) < len(indices)
        self.sequences = rows
        self.padding = [self.padding[index] for index in indices]
        picked = torch.tensor(indices, device=self.device)
        with torch.inference_mode(False):
            self.bad_rows = self.bad_rows[picked.clone()]
            if self.recent is not None:
                self.recent.select(picked.clone())

    def _write_filled(self, layer: int, new: Rows) -> Rows | None:
        """Return the last rows unquantized, including the step's own, and store the blocks that they fill."""
        if self.recent is None:
            return None
        exact = self.recent.take(layer, *new)
        group, size = self.blocks.group_of[layer], self.layout.block_size
        for row, filled in enumerate(self.batches[group].sealing(0, size)):
            if filled:
                sequence = self.sequences[row]
                first = exact[0].shape[2] - sequence.length + filled.start * size
                rows = (x[row, :, first : first + len(filled) * size] for x in exact)
                k, v = (x.unflatten(1, (-1, size)).transpose(0, 1) for x in rows)
                self.blocks.stores[layer].write_blocks(
                    k, v, sequence.tables[group][filled.start : filled.stop]
                )
        return exact

    def _refill(self, recent: RecentRows) -> None:
        """Read tokens back from blocks that are no longer full, or whose tokens are recent again."""
        size, held = self.layout.block_size, recent.held
        old, *_ = parts_of(self.layout.exact, size)
        waiting = max(max(s.length % size, s.length - old.edge(s.length)) for s in self.sequences)
        if held >= waiting:
            return
        for layer, group in self.blocks.group_of.items():
            rows = recent.rows(layer, waiting)
            for row, sequence in enumerate(self.sequences):
                first, end = max(0, sequence.length - waiting), sequence.length - held
                if first < end:
                    table = torch.tensor([sequence.tables[group]], dtype=torch.int32, device=self.device)
                    stored = self.blocks.gather(layer, table, first, end, unrotate=True)
                    for x, read in zip(rows, stored, strict=True):
                        x[row, :, waiting - held - (end - first) : waiting - held] = read[0]
            recent.refill(layer, *rows)

    def _packed(self, x: Tensor) -> Tensor:
        """[batch, heads, count, dim] -> [tokens, heads, dim], without padding."""
        flat = x.transpose(1, 2).flatten(0, 1)
        return flat if self._place is None else flat[self._place]

    def _unpacked(self, packed: Tensor) -> Tensor:
        """[tokens, ...] -> [batch, count, ...], zero where a token is padding."""
        if self._place is not None:
            full = packed.new_zeros(self.batch * self._count, *packed.shape[1:])
            packed = full.index_copy_(0, self._place, packed)
        return packed.view(self.batch, self._count, *packed.shape[1:])

    def _places(self, counts: list[int]) -> Tensor:
        ends = range(self._count, self._count * (self.batch + 1), self._count)
        places = [p for end, new in zip(ends, counts, strict=True) for p in range(end - new, end)]
        return torch.tensor(places, dtype=torch.int64, device=self.device)

    def _least_blocks(self, batch: int) -> list[int]:
        """Return the initial number of blocks per group: enough for `max_tokens` per row, or one per row."""
        return [batch * -(-(self.max_tokens or 1) // self.layout.block_size)] * len(self.layout.groups)

    def _make_room(self, work: list[tuple[Sequence, int]]) -> None:
        """Grow the pools until the tokens fit, by the number of missing blocks or a little more."""
        if self.manager.can_append(work):
            return
        size = self.layout.block_size
        new = sum(-(-(s.length + count) // size) - -(-s.length // size) for s, count in work)
        copies = len(work) if self._may_copy else 0
        target = []
        for usage in self.manager.usage():
            lacking = max(0, new + copies - usage.free - usage.cached)
            spare = 0 if self.max_tokens else usage.total // _GROWTH
            target.append(usage.total + (max(lacking, spare) if lacking else 0))
        self._grow_to(target)
        if not self.manager.can_append(work):
            raise OutOfBlocks(f"{new} new blocks and {copies} copies don't fit into pools of {target}")

    def _grow_to(self, target: list[int]) -> None:
        wanted = [max(new, old) for new, old in zip(target, self.blocks.num_blocks, strict=True)]
        if wanted != self.blocks.num_blocks:
            self.blocks.grow(wanted)
            self.manager.grow(wanted)
