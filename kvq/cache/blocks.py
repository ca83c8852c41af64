"""Block operations of all caches, independent of the blocks' content: copy, fill, read and write."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from kvq.blockmgr.events import Copy, Demote, Fill, Order, Scrub
from kvq.blockmgr.packed.ladder import Pack, Packed
from kvq.cache.stores.recurrent import StateSlots
from kvq.errors import ConfigError
from kvq.kernels.copy_blocks.reference import copy_blocks
from kvq.tiers.tiers import Tiers


class BlockCache:
    """Base class of cache backends: the part of `CacheBackend` that moves whole blocks.

    A backend adds `stores` and `grow`, and sets `_parts`: for each layer group, all bytes of its blocks, as
    uint8 tensors [num_blocks, bytes of one block in the tensor].
    """

    states: StateSlots | None = None  # recurrent states
    tiers: Tiers | None = None  # take evicted blocks
    codec: Any = None  # of a ladder: `kvq.cache.cold.ColdCodec`

    def __init__(self, num_groups: int) -> None:
        self._parts: list[Sequence[Tensor]] = [()] * num_groups

    @property
    def num_blocks(self) -> list[int]:
        return [len(parts[0]) for parts in self._parts]

    @property
    def nbytes(self) -> int:
        return sum(part.numel() for parts in self._parts for part in parts)

    def copy(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        self._check_blocks(group, [block for pair in pairs for block in pair])
        copy_blocks(self._parts[group], pairs)

    def scrub(self, group: int, blocks: Sequence[int]) -> None:
        self._check_blocks(group, blocks)
        for part in self._parts[group]:
            for block in blocks:
                part[block] = 0

    def carry_out(self, orders: Sequence[Order]) -> None:
        for _, like in groupby(orders, key=_kind):
            alike: list[Any] = list(like)
            match alike[0]:
                case Copy():
                    for group in dict.fromkeys(order.group for order in alike):
                        self.copy(group, [(o.source, o.target) for o in alike if o.group == group])
                case Fill(group=group, rung=rung):
                    self._fill(group, rung, alike)
                case Scrub(group=group):
                    self.scrub(group, [order.block for order in alike])
                case Demote(group=group, form=form):
                    assert self.tiers is not None, "the block manager has them"
                    contents = self.contents(group, [order.source for order in alike], form.rung)
                    for order, content in zip(alike, contents, strict=True):
                        self.tiers.put(order.key, content.numpy(), order.form)
                case Pack():
                    for order in alike:
                        self._pack(order)

    def read_block(self, group: int, block: int) -> Tensor:
        self._check_blocks(group, [block])
        return self.block_content(group, block).cpu()

    def block_content(self, group: int, block: int) -> Tensor:
        """Return a copy of a block's bytes on the device, uint8 [bytes of a block]."""
        return torch.cat([part[block] for part in self._parts[group]])

    def contents(self, group: int, sources: Sequence[int | Packed], rung: int) -> list[Tensor]:
        """Return the bytes of blocks in the format of a rung, or of packed blocks, on the host."""
        if rung and not isinstance(sources[0], Packed):
            found = self.codec.encode(group, sources, rung)
        else:
            found = [self._content(group, source) for source in sources]
        return [content.cpu() for content in found]

    def _content(self, group: int, source: int | Packed) -> Tensor:
        """Return a copy of the bytes of a block or a packed block on the device."""
        if not isinstance(source, Packed):
            return self.block_content(group, source)
        size, total = self.codec.block_bytes(source.form.rung, group), self.codec.block_bytes(0, group)
        start = source.slot * size
        first, last = start // total, (start + size - 1) // total
        around = torch.cat([self.block_content(group, block) for block in source.blocks[first : last + 1]])
        return around[start - first * total :][:size].clone()

    def _pack(self, order: Pack) -> None:
        """Rewrite blocks, or packed blocks, in the format of a rung."""
        group, source = order.group, order.sources[0]
        if isinstance(source, Packed):
            contents = [self._content(group, one) for one in order.sources]
            packed = self.codec.recode(group, contents, source.form.rung, order.rung)
        else:
            blocks = [one for one in order.sources if not isinstance(one, Packed)]
            packed = self.codec.encode(group, blocks, order.rung)
        flat = torch.cat(packed)
        room = flat.new_zeros(len(order.targets), self.codec.block_bytes(0, group))
        room.flatten()[: flat.numel()] = flat
        for block, content in zip(order.targets, room, strict=True):
            self.write_block(group, block, content)

    def _fill(self, group: int, rung: int, fills: Sequence[Fill]) -> None:
        """Overwrite blocks of one group with contents of one rung."""
        contents = [
            self._content(group, fill.content) if isinstance(fill.content, Packed) else _tensor(fill.content)
            for fill in fills
        ]
        if rung:
            self.codec.decode(group, contents, rung, [fill.block for fill in fills])
            return
        for fill, content in zip(fills, contents, strict=True):
            self.write_block(group, fill.block, content)

    def write_block(self, group: int, block: int, content: Tensor) -> None:
        self._check_blocks(group, [block])
        parts = self._parts[group]
        pieces = content.to(parts[0].device).split([part.shape[1] for part in parts])
        for part, piece in zip(parts, pieces, strict=True):
            part[block] = piece

    def _check_growth(self, num_blocks: list[int]) -> None:
        old = self.num_blocks
        if len(num_blocks) != len(old) or any(map(int.__lt__, num_blocks, old)):
            raise ConfigError(f"pools can only grow, from {old} blocks, got {num_blocks}")

    def _check_blocks(self, group: int, blocks: Sequence[int]) -> None:
        count = len(self._parts[group][0])
        if blocks and not 0 <= min(blocks) <= max(blocks) < count:
            raise ConfigError(
                f"group {group} has blocks 0 to {count - 1}, got {sorted(set(blocks))}; "
                f"give the block manager and the cache the same num_blocks"
            )


def _kind(order: Order) -> tuple[Any, ...]:
    """Return what consecutive orders that are carried out together have in common."""
    match order:
        case Demote(group=group, source=source, form=form):
            return Demote, group, form.rung, isinstance(source, Packed)
        case Fill(group=group, rung=rung):
            return Fill, group, rung
        case Scrub(group=group):
            return Scrub, group
    return (type(order),)  # groups share no blocks


def _tensor(content: Any) -> Tensor:
    """Return the bytes of a buffer, uint8, without a copy if it is writable."""
    writable = bytearray(content) if memoryview(content).readonly else content
    return torch.frombuffer(writable, dtype=torch.uint8)
