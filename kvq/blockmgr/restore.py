"""Restoring: brings a prompt's blocks back from where they were packed, and from the tiers."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from kvq.blockmgr.events import Fill
from kvq.blockmgr.hits import Prefixes, most_cold, most_reused
from kvq.blockmgr.packed.ladder import Packed
from kvq.blockmgr.pool import BlockId
from kvq.blockmgr.prefix import PrefixQuery
from kvq.blockmgr.sequence import Sequence
from kvq.blockmgr.tables import Tables
from kvq.errors import OutOfBlocks
from kvq.tiers.tiers import OWN_FORM, BlockKey, Form

Missing = list[tuple[BlockId, BlockKey]]  # blocks to fill, and what belongs there


@dataclass(slots=True, eq=False)
class Restore:
    """Sequence whose missing blocks are being filled in; see `Below.restore`."""

    sequence: Sequence
    missing: Missing
    packed: dict[BlockKey, Packed]  # those that a ladder packed
    coldest: dict[bytes, int] = field(default_factory=dict)  # by digest, rungs above 0


class Below:
    """Access to what is kept of prefixes beyond the index: packed blocks, and the tiers below the pools."""

    def __init__(
        self,
        tables: Tables,
        prefixes: Prefixes,
        begin: Callable[[PrefixQuery], Sequence],
        commit: Callable[[Sequence], None],
        free: Callable[[Sequence], object],
    ) -> None:
        """`begin`, `commit`, `free`: of the block manager, for sequences."""
        self._blocks, self._tables, self._prefixes = tables.blocks, tables, prefixes
        self._begin, self._commit, self._free = begin, commit, free

    def restorable(self, prompt: PrefixQuery) -> int:
        """Return how many tokens of a prompt would be a hit after `restore`. Changes nothing.

        0 without tiers or packed blocks; otherwise a multiple of the block size.
        """
        blocks = self._blocks
        if blocks.tiers is None and not len(blocks.ladder):
            return 0
        size, cold = blocks.block_size, set[int]()
        depth = most_reused(prompt) // size

        def has(group: int, index: int) -> bool:
            coldest = self._coldest(prompt, group, index)
            if coldest:
                cold.add(index)
            return coldest is not None

        for group, window in enumerate(blocks.windows):
            if window is None:
                end = blocks.entries(group, depth * size)
                depth = next((i for i in range(end) if not has(group, i)), depth)
        if len(found := sorted(index for index in cold if index < depth)) > (
            allowed := most_cold(blocks, prompt)
        ):
            depth = found[allowed]
        while depth and not all(
            has(group, i)
            for group, window in enumerate(blocks.windows)
            if window is not None
            for i in range(blocks.first_seen(group, depth * size), depth)
        ):
            depth -= 1
        return depth * size

    def is_too_cold(self, prompt: PrefixQuery, index: int) -> bool:
        """Return True if a block is kept, but only in fewer bits."""
        return any(self._coldest(prompt, group, index) for group in range(len(self._blocks.pools)))

    def _coldest(self, prompt: PrefixQuery, group: int, index: int) -> int | None:
        """Return the coldest rung that a block has been on, wherever it is, or None if it is nowhere."""
        blocks = self._blocks
        key = BlockKey(prompt.root, blocks.index.digest_at(prompt, index), group)
        if (node := blocks.index.get(key.digest)) is not None and node.blocks[group] is not None:
            return node.coldest
        packed = blocks.ladder.find(key)
        form = packed.form if packed is not None else None if blocks.tiers is None else blocks.tiers.find(key)
        return None if form is None else form.coldest

    def restore(self, prompt: PrefixQuery, length: int) -> Restore:
        """Start a sequence whose first `length` tokens are indexed or are filled in.

        Call `fill` for every missing block and then `end`.

        Raises:
            OutOfBlocks: there are too few blocks; nothing was changed.
        """
        starts, tables, missing = self._take_missing(prompt, length)
        sequence = self._begin(prompt)
        sequence.adopt(length, starts, tables, self._blocks.block_bytes)
        self._prefixes.announce(sequence, prompt)
        self._blocks.events.deliver()
        places = {key: self._blocks.ladder.find(key) for _, key in missing}
        return Restore(sequence, missing, {key: place for key, place in places.items() if place is not None})

    def _take_missing(
        self, prompt: PrefixQuery, length: int
    ) -> tuple[list[int], list[list[BlockId]], Missing]:
        """Share the indexed blocks of a prompt's first `length` tokens, and allocate the others.

        Returns the table index of the first block and the blocks, both by layer group, and the allocated
        blocks with the identity of what has to be filled in.
        """
        blocks, total = self._blocks, length // self._blocks.block_size
        nodes = blocks.index.walk(prompt, total)
        ends = [blocks.entries(group, length) for group in range(len(blocks.pools))]
        starts = [min(blocks.first_seen(group, length), end) for group, end in enumerate(ends)]
        held = [
            [nodes[i].blocks[group] if i < len(nodes) else None for i in range(start, end)]
            for group, (start, end) in enumerate(zip(starts, ends, strict=True))
        ]
        keys = [
            [BlockKey(prompt.root, blocks.index.digest_at(prompt, i), group) for i in range(start, end)]
            for group, (start, end) in enumerate(zip(starts, ends, strict=True))
        ]
        lacks = [key for own in map(zip, held, keys) for block, key in own if block is None]
        packed = [key for key in lacks if blocks.ladder.find(key) is not None]
        shared = [[block for block in own if block is not None] for own in held]
        blocks.share(shared)
        blocks.ladder.hold(packed)
        try:
            taken = blocks.take([own.count(None) for own in held])
        except OutOfBlocks:
            blocks.ladder.drop(packed, read=False)
            blocks.release(shared)
            raise
        fresh = [iter(own) for own in taken]
        tables = [
            [next(new) if block is None else block for block in own]
            for new, own in zip(fresh, held, strict=True)
        ]
        return starts, tables, list(zip([block for own in taken for block in own], lacks, strict=True))

    def take_over(self, prompt: PrefixQuery, length: int) -> Sequence:  # D404: with the last, partial block
        """Start a sequence whose first `length` tokens another engine has computed, not only whole blocks.

        Like `adopt`, but nothing is announced, and blocks are indexed only once they are old enough.
        """
        starts, taken = self._tables.take_first(length)
        sequence = self._begin(prompt)
        sequence.adopt(length, starts, taken, self._blocks.block_bytes)
        sequence.adopted = 0
        return sequence

    def fill(self, restore: Restore, index: int, content: Any = None, form: Form = OWN_FORM) -> None:
        """Queue the filling of missing block number `index`, from `content` or, by default, its extent."""
        block, key = restore.missing[index]
        if (packed := restore.packed.get(key)) is not None:
            content, form = packed, packed.form
        self._blocks.orders.append(Fill(group=key.group, block=block, content=content, rung=form.rung))
        if form.coldest:
            restore.coldest[key.digest] = max(form.coldest, restore.coldest.get(key.digest, 0))

    def end(self, restore: Restore, *, is_complete: bool) -> None:
        """Index the restored blocks; free the sequence to let others evict them.

        Unless all of them were filled, give them up, and free the sequence.
        """
        if is_complete:
            self._commit(restore.sequence)
            self._prefixes.withdraw(restore.sequence)
            for digest, rung in restore.coldest.items():
                if (node := self._blocks.index.get(digest)) is not None:
                    node.coldest = max(node.coldest, rung)
        self._blocks.ladder.drop(restore.packed, read=is_complete)
        if not is_complete:
            self._free(restore.sequence)

    def cold_tokens(self, sequence: Sequence) -> int:
        """Return how many tokens of a sequence's indexed prefix were ever stored in fewer bits."""
        node, count = sequence.node, 0
        while node.parent is not None:
            count, node = count + (node.coldest > 0), node.parent
        return count * self._blocks.block_size

    def give_up(self, prompt: PrefixQuery, *, to_tiers: bool) -> None:
        """Evict the cached blocks of a prompt that no other prefix continues, deepest first.

        `to_tiers`: whether the tiers take them.
        """
        blocks = self._blocks
        with nullcontext() if to_tiers else blocks.discarding():
            for node in reversed(blocks.index.walk(prompt, len(prompt.tokens) // blocks.block_size)):
                if node.children:
                    break
                for pool, block in zip(blocks.pools, list(node.blocks), strict=True):
                    if block is not None and not pool.references(block):
                        pool.forget(block)
        blocks.events.deliver()
