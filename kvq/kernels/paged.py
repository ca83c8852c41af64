"""Tensors on which kernels operate: one layer's blocks, and the sequences of one step."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kvq.formats import ExactTokens, LayerFormats
from kvq.kernels.uploads import upload

Rows = tuple[Tensor, Tensor]  # K and V
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class _Kept(dict[Hashable, Any]):
    """Cache of values that kernels derive from tensors once for all steps or layers.

    A deep copy starts empty, because the values refer to the original's memory.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Kept":
        return _Kept()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PagedRows:
    """K or V of one layer, in blocks.

    Kernels take strides from the tensors, never from their shapes: blocks may be padded, and a block
    of all layers may lie between the starts of a layer's consecutive blocks.
    """

    codes: Tensor  # [num_blocks, kv_heads, block_size, row elements of the code dtype]
    # fp16, or uint8 if narrow or per channel: [num_blocks, kv_heads, block_size, scales per row]; per
    # channel, all rows of a block share one row of memory
    scales: Tensor | None
    static_scale: Tensor | None  # fp32 [kv_heads]
    means: Tensor | None = None  # uint8 [num_blocks, kv_heads, bytes of a mean: codes, then scales]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PagedKV:
    """One layer's K and V in blocks, and their formats."""

    k: PagedRows
    v: PagedRows
    formats: LayerFormats
    block_size: int  # tokens
    kept: _Kept = field(default_factory=_Kept, init=False, repr=False)

    def dense(self, sequences: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Return empty tensors for K and V: fp32 [sequences, kv_heads, tokens, dim] each."""
        shape, device = (sequences, self.k.codes.shape[1], tokens), self.k.codes.device
        k_dim, v_dim = self.formats.k_head_dim, self.formats.v_head_dim
        return torch.empty(*shape, k_dim, device=device, dtype=torch.float32), torch.empty(
            *shape, v_dim, device=device, dtype=torch.float32
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StagedKV:
    """One layer's blocks under a staged recipe: sealed blocks, and blocks of unquantized tokens."""

    sealed: PagedKV
    recent: PagedKV
    sinks: PagedKV | None
    exact: ExactTokens  # in whole blocks
    kept: _Kept = field(default_factory=_Kept, init=False, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SequenceBatch:
    """The sequences of one step as one layer group sees them, in the order in which tokens are packed.

    Sequence i adds query_lens[i] tokens to its context, which is then context_lens[i] tokens long; its new
    tokens are at the last query_lens[i] positions.
    """

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    tables: Tensor  # int32 [sequences, blocks of the longest]; entries past a sequence's end unused
    slots: Tensor  # int64 [tokens]: block * block_size + offset of every new token, negative for padding
    lens: Tensor | None = None  # int32 [3, sequences] on the device: first token, new tokens, context
    # D139: lengths on the device don't imply a captured graph
    is_captured: bool = False  # contexts grow while a graph is replayed: `context_lens` are upper limits
    left_out: frozenset[int] = frozenset()  # sequences whose new tokens another kernel handles
    kept: _Kept = field(default_factory=_Kept, init=False, repr=False)

    def device_lens(self) -> Tensor:
        """Return `lens`, which GPU kernels read; if missing, create it once, without synchronization."""
        if self.lens is not None:
            return self.lens
        if "lens" not in self.kept:
            starts = (0, *accumulate(self.query_lens))[: len(self.query_lens)]
            lens = starts, self.own_lens, self.context_lens
            self.kept["lens"] = upload(lens, self.tables.device, torch.int32)
        kept: Tensor = self.kept["lens"]
        return kept

    @property
    def own_lens(self) -> tuple[int, ...]:
        """Number of new tokens of each sequence; 0 for sequences left out, whose tokens stay packed."""
        return tuple(0 if i in self.left_out else new for i, new in enumerate(self.query_lens))

    def without(self, sequences: Iterable[int]) -> "SequenceBatch":
        """Return the batch for a kernel that skips `sequences`; the batch is created once for all layers."""
        if not (some := frozenset(sequences)):
            return self
        name = SequenceBatch.without, some
        if name not in self.kept:
            if (lens := self.lens) is not None:  # which only the device may know
                lens = lens.clone()
                for i in some:
                    lens[1, i].zero_()
            self.kept[name] = replace(self, left_out=some, lens=lens)
        kept: SequenceBatch = self.kept[name]
        return kept

    def only(self, sequences: Sequence[int]) -> "SequenceBatch":
        """Return a batch of only `sequences`, packed anew and created once for all layers."""
        name = SequenceBatch.only, tuple(sequences)
        if name not in self.kept:
            self.kept[name] = replace(
                self,
                query_lens=tuple(self.query_lens[i] for i in sequences),
                context_lens=tuple(self.context_lens[i] for i in sequences),
                tables=self.tables[list(sequences)],
                slots=torch.cat([self.slots[rows] for rows in self.rows_of(sequences)]),
                lens=None,
            )
        kept: SequenceBatch = self.kept[name]
        return kept

    def rows_of(self, sequences: Iterable[int]) -> list[slice]:
        """Return the packed rows of the new tokens in each of `sequences`."""
        starts = (0, *accumulate(self.query_lens))
        return [slice(starts[i], starts[i + 1]) for i in sequences]

    def sealing(self, recent: int, block_size: int) -> list[range]:
        """Return each sequence's blocks that are now old enough to seal, as table indices."""
        return [
            range(*(max(0, length - recent) // block_size for length in (end - new, end)))
            for new, end in zip(self.query_lens, self.context_lens, strict=True)
        ]

    @classmethod
    def of(
        cls,
        tables: Sequence[Sequence[int]],
        slots: Sequence[int],
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        device: torch.device,
    ) -> "SequenceBatch":
        """Make a batch from tables (one list of block ids per sequence) and slots."""
        width = max(1, *map(len, tables))
        rows = [[*map(int, table), *[0] * (width - len(table))] for table in tables]
        return cls(
            query_lens=tuple(query_lens),
            context_lens=tuple(context_lens),
            tables=torch.tensor(rows, dtype=torch.int32, device=device),
            slots=torch.tensor(slots, dtype=torch.int64, device=device),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StagedBatch:
    """The sequences of one step as the layer groups of a staged layer see them."""

    sealed: SequenceBatch
    recent: SequenceBatch
    sinks: SequenceBatch | None

    @property
    def slots(self) -> Tensor:
        """Slots to which new tokens are written, int64 [tokens]."""
        return self.recent.slots


def plain_blocks(k: Tensor, v: Tensor, block_size: int) -> PagedKV:
    """Return rows [blocks, kv_heads, block_size, dim] of one dtype (fp32, bf16 or fp16) as blocks."""
    formats = LayerFormats.plain(_NAMES[k.dtype], k.shape[3], v.shape[3])
    rows = [PagedRows(codes=x, scales=None, static_scale=None) for x in (k, v)]
    return PagedKV(k=rows[0], v=rows[1], formats=formats, block_size=block_size)


def as_tokens(recent: Rows) -> PagedKV:
    """Return dense rows [sequences, kv_heads, some, dim] as blocks of one token."""
    sequences, heads, some, _ = recent[0].shape
    rows = []
    for x in recent:
        apart = x.stride(0) // x.stride(2)
        assert apart == recent[0].stride(0) // recent[0].stride(2), "K and V lie alike"
        size = ((sequences - 1) * apart + some, heads, 1, x.shape[3])
        rows.append(x.as_strided(size, (x.stride(2), x.stride(1), x.stride(2), 1)))
    return plain_blocks(rows[0], rows[1], 1)


def tables_of_tokens(recent: Rows, context_lens: Sequence[int]) -> Tensor:
    """Return each position's row in `as_tokens`, int32 [sequences, longest context]; 0 if it has none."""
    some, apart = recent[0].shape[2], recent[0].stride(0) // recent[0].stride(2)
    position = torch.arange(max(context_lens), dtype=torch.int32)
    ends = torch.tensor(context_lens, dtype=torch.int32)[:, None]
    rows = position - ends + some + torch.arange(len(context_lens), dtype=torch.int32)[:, None] * apart
    held = (position >= ends - some) & (position < ends)
    return torch.where(held, rows, 0).int().to(recent[0].device)
