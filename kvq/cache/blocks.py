"""Block operations of all caches, independent of the blocks' content: copy, swap, read and write."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvq.blockmgr.events import Copy, Demote, Fill, Order, Scrub, SwapIn, SwapOut
from kvq.cache.stores.recurrent import StateSlots
from kvq.errors import ConfigError
from kvq.kernels.copy_blocks.reference import copy_blocks
from kvq.tiers.tiers import Tiers


class _SwapStore(Protocol):
    """Swapped-out blocks by layer group and host slot."""

    @property
    def nbytes(self) -> int: ...

    def put(self, group: int, slot: int, content: Tensor) -> None: ...

    def get(self, group: int, slot: int) -> Tensor | None: ...

    def close(self) -> None: ...


class BlockCache:
    """Base class of cache backends: the part of `CacheBackend` that moves whole blocks.

    A backend adds `stores` and `grow`, and sets `_parts`: for each layer group, all bytes of its blocks, as
    uint8 tensors [num_blocks, bytes of one block in the tensor].
    """

    states: StateSlots | None = None  # recurrent states
    tiers: Tiers | None = None  # take evicted blocks

    def __init__(self, num_groups: int, store: _SwapStore | None = None) -> None:
        self._parts: list[Sequence[Tensor]] = [()] * num_groups
        self._host = store

    @property
    def num_blocks(self) -> list[int]:
        return [len(parts[0]) for parts in self._parts]

    @property
    def nbytes(self) -> int:
        return sum(part.numel() for parts in self._parts for part in parts)

    @property
    def host_bytes(self) -> int:
        return 0 if self._host is None else self._host.nbytes

    def copy(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        self._check_blocks(group, [block for pair in pairs for block in pair])
        copy_blocks(self._parts[group], pairs)

    def scrub(self, group: int, blocks: Sequence[int]) -> None:
        self._check_blocks(group, blocks)
        for part in self._parts[group]:
            for block in blocks:
                part[block] = 0

    def swap_out(self, group: int, block: int, slot: int) -> None:
        self._swap_store().put(group, slot, self.read_block(group, block))

    def swap_in(self, group: int, slot: int, block: int) -> bool:
        self._check_blocks(group, [block])
        content = self._swap_store().get(group, slot)
        if content is None:
            self.scrub(group, [block])
            return False
        self.write_block(group, block, content)
        return True

    def carry_out(self, orders: Sequence[Order]) -> list[SwapIn]:
        if not orders:
            return []
        failed: list[SwapIn] = []
        copies: dict[int, list[tuple[int, int]]] = {}  # by group: groups share no blocks
        for order in [*orders, None]:  # None flushes the remaining copies
            if isinstance(order, Copy):
                copies.setdefault(order.group, []).append((order.source, order.target))
                continue
            for group, pairs in copies.items():
                self.copy(group, pairs)
            copies.clear()
            match order:
                case SwapOut(group=group, block=block, slot=slot):
                    self.swap_out(group, block, slot)
                case SwapIn(group=group, slot=slot, block=block):
                    if not self.swap_in(group, slot, block):
                        failed.append(order)
                case Scrub(group=group, block=block):
                    self.scrub(group, [block])
                case Demote(group=group, block=block, key=key):
                    assert self.tiers is not None, "the block manager has them"
                    self.tiers.put(key, self.read_block(group, block).numpy())
                case Fill(group=group, block=block, content=content):
                    writable = bytearray(content) if memoryview(content).readonly else content
                    self.write_block(group, block, torch.frombuffer(writable, dtype=torch.uint8))
        return failed

    def read_block(self, group: int, block: int) -> Tensor:
        self._check_blocks(group, [block])
        return torch.cat([part[block] for part in self._parts[group]]).cpu()

    def write_block(self, group: int, block: int, content: Tensor) -> None:
        self._check_blocks(group, [block])
        parts = self._parts[group]
        pieces = content.to(parts[0].device).split([part.shape[1] for part in parts])
        for part, piece in zip(parts, pieces, strict=True):
            part[block] = piece

    def close(self) -> None:
        if self._host is not None:
            self._host.close()

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

    def _swap_store(self) -> _SwapStore:
        if self._host is None:
            raise ConfigError(
                "an order to swap a block, but the cache has no host store; give KVCache the block "
                "manager's host_slots"
            )
        return self._host
