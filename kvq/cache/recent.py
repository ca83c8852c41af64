"""The last tokens of every row as they came, beside their quantized blocks, and attention over both."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvq.cache.kv_cache import KVCache
from kvq.cache.memory import allocate_bytes
from kvq.kernels import AttentionOptions, Device, KernelSpec, PagedKV, SequenceBatch, select
from kvq.kernels.codec import rotate
from kvq.kernels.plain import Rows, as_tokens, plain_blocks

_Plan = tuple[Callable[..., Any], Callable[..., Any]]  # `attend` for rows as they came, and `merge_partials`
_LEAST_BLOCK = 256  # tokens


class RecentRows:
    """K and V of each layer's last tokens, unquantized.

    Attention looks at recent tokens most, so a few of them exact save much of what 4 bits cost. The
    blocks hold these tokens too: dropping recent rows loses precision, never tokens.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit  # tokens per row
        self._layers: dict[int, _Tail] = {}

    @property
    def nbytes(self) -> int:
        return sum(tail.k.nbytes + tail.v.nbytes for tail in self._layers.values())

    def clear(self) -> None:
        self._layers.clear()

    def take(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Remember a step's rows; return the exact rows that end with them.

        `k`, `v`: [batch, kv_heads, count, dim]. Returns those held before and all of the step's own,
        [batch, kv_heads, count + up to `limit`, dim], valid until the layer's next step.
        """
        if layer not in self._layers:
            self._layers[layer] = _Tail(k, v, self.limit)
        return self._layers[layer].push(k, v, self.limit)

    def truncate(self, count: int) -> None:
        """Drop the last `count` tokens; those before them stay exact as far as they are held."""
        for tail in self._layers.values():
            tail.held = max(0, tail.held - count)
            tail.end -= min(tail.end, count)

    @property
    def held(self) -> int:
        """How many of the last tokens are there, in all layers."""
        return min((tail.held for tail in self._layers.values()), default=0)

    def rows(self, layer: int, count: int) -> Rows:
        """A copy of a layer's last `count` rows, zero before those that are held."""
        tail = self._layers[layer]
        have = [x[:, :, tail.end - tail.held : tail.end] for x in (tail.k, tail.v)]
        k, v = (torch.nn.functional.pad(x[:, :, -count:], (0, 0, max(0, count - tail.held), 0)) for x in have)
        return k, v

    def refill(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Take rows [batch, kv_heads, at most `limit`, dim] as a layer's last ones."""
        tail = self._layers[layer]
        tail.held = tail.end = k.shape[2]
        tail.k[:, :, : tail.end], tail.v[:, :, : tail.end] = k, v

    @torch.inference_mode(False)
    def select(self, indices: Tensor) -> None:
        """Make row i what row `indices[i]` was."""
        for tail in self._layers.values():
            tail.k, tail.v = tail.k[indices], tail.v[indices]


def _rows_of(x: Tensor, room: int) -> Tensor:
    """Zeros [batch, kv_heads, room, dim] for rows such as `x`."""
    shape = torch.Size((*x.shape[:2], room, x.shape[3]))
    nbytes = shape.numel() * x.element_size()
    memory = allocate_bytes(nbytes, x.device, purpose="KvqCache's recent tokens")
    return memory.view(x.dtype).view(shape)


class _Tail:
    """One layer's recent rows: the last `held` before place `end` of two buffers.

    The buffers have room for a quarter more than is held, so that rows seldom move.
    """

    @torch.inference_mode(False)
    def __init__(self, k: Tensor, v: Tensor, limit: int) -> None:
        """Empty buffers for rows such as `k` and `v`; made during inference, they'd be fit for it only."""
        room = limit + -(-limit // 4)
        self.k, self.v = (_rows_of(x, room) for x in (k, v))
        self.held = self.end = 0

    def push(self, k: Tensor, v: Tensor, limit: int) -> tuple[Tensor, Tensor]:
        count, room = k.shape[2], self.k.shape[2]
        if self.held + count > room:
            exact = [torch.cat((old, new), dim=2) for old, new in zip(self._rows(), (k, v), strict=True)]
            self.held = self.end = min(limit, self.held + count)
            for rows, all_of_them in zip((self.k, self.v), exact, strict=True):
                rows[:, :, : self.end] = all_of_them[:, :, -self.end :]
            return exact[0], exact[1]
        if self.end + count > room:
            for rows in (self.k, self.v):
                rows[:, :, : self.held] = rows[:, :, self.end - self.held : self.end].clone()
            self.end = self.held
        self.k[:, :, self.end : self.end + count] = k
        self.v[:, :, self.end : self.end + count] = v
        self.end += count
        self.held += count
        exact_k, exact_v = self._rows()
        self.held = min(self.held, limit)
        return exact_k, exact_v

    def _rows(self) -> tuple[Tensor, Tensor]:
        held = slice(self.end - self.held, self.end)
        return self.k[:, :, held], self.v[:, :, held]


def put_over(dense: Tensor, exact: Tensor, lengths: tuple[int, ...], start: int, rotated: bool) -> None:
    """Put exact rows over the last dequantized ones of every row.

    `dense`: [batch, kv_heads, tokens, dim], the positions from `start` on, of rotated formats maybe;
    `exact`: [batch, kv_heads, some, dim], the last ones of each row; row i is `lengths[i]` long.
    """
    if rotated:
        exact = rotate(exact)
    for i, length in enumerate(lengths):
        some = min(exact.shape[2], length - start)
        dense[i, :, length - start - some : length - start] = exact[i, :, exact.shape[2] - some :]


def attend_both(
    cache: KVCache,
    layer: int,
    q: Tensor,
    batch: SequenceBatch,
    recent: Rows,
    options: AttentionOptions,
) -> Tensor:
    """What `KVCache.attend` does, but with `recent` in place of the last tokens in the blocks.

    `recent`: K and V of every sequence's last tokens, the step's own among them,
    [sequences, kv_heads, some, dim]; of shorter sequences the last rows count. Both parts are
    merged by their log-sum-exp, exactly. Returns [tokens, q_heads, v_head_dim] in q's dtype.
    """
    some = recent[0].shape[2]
    whole = min(batch.context_lens) >= some
    kv = _as_blocks(recent) if whole else as_tokens(recent)
    attend, merge = _plan(cache.layer(layer), q, kv)
    own = _own(batch, recent, whole)
    # On a CPU both parts stay fp32 until they are merged; GPUs multiply in 16 bits.
    query = q.float() if q.device.type == "cpu" else q
    without_sinks = options.without_sinks()
    parts = [attend(query, kv, own, without_sinks)]
    if max(batch.context_lens) > some:
        parts.append(cache.attend(layer, query, batch, without_sinks, skip_last=some))
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    out: Tensor = merge(outs, lses, options.sinks)[0]
    return out.to(q.dtype)


def _plan(older: PagedKV, q: Tensor, own: PagedKV) -> _Plan:
    """Found once for a layer's blocks and kept with them."""
    name = (_plan, own.k.codes.dtype, own.v.codes.dtype)
    if name not in older.kept:
        heads = own.k.codes.shape[1]
        spec = KernelSpec(formats=own.formats, q_heads=q.shape[1], kv_heads=heads, block_size=1)
        where = Device.of(q.device)
        attend, merge = (select(operation, spec, where).run for operation in ("attend", "merge_partials"))
        older.kept[name] = (attend, merge)
    plan: _Plan = older.kept[name]
    return plan


def _own(batch: SequenceBatch, recent: Rows, whole: bool) -> SequenceBatch:
    """The step as the recent rows see it: one for all layers that lie alike, so kernels plan once."""
    sequences, _, some, _ = recent[0].shape
    apart = 0 if whole else recent[0].stride(0) // recent[0].stride(2)  # rows from one sequence to the next
    name = (_own, some, apart)
    if name not in batch.kept:
        tables = torch.arange(sequences, dtype=torch.int32)[:, None]
        if not whole:
            tables = torch.zeros(sequences, some, dtype=torch.int32)
            for i, context in enumerate(batch.context_lens):
                held = min(some, context)
                first = i * apart + some - held
                tables[i, :held] = torch.arange(first, first + held, dtype=torch.int32)
        batch.kept[name] = SequenceBatch(
            query_lens=batch.query_lens,
            context_lens=tuple(min(some, context) for context in batch.context_lens),
            tables=tables.to(recent[0].device),
            slots=batch.slots,
        )
    own: SequenceBatch = batch.kept[name]
    return own


def _as_blocks(recent: Rows) -> PagedKV:
    """Dense rows [sequences, kv_heads, some, dim] as one unquantized block per sequence.

    The block is said to be larger than it is: no key lies past the rows, and kernels that are
    compiled per block size see few sizes.
    """
    return plain_blocks(*recent, max(_LEAST_BLOCK, 1 << (recent[0].shape[2] - 1).bit_length()))
