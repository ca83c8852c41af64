"""Tables: the blocks of every sequence in every layer group, and the slots of its new tokens."""

from dataclasses import dataclass

from kvq.blockmgr.ids import BlockId
from kvq.blockmgr.pool import BlockPool
from kvq.errors import ConfigError, OutOfBlocks


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence's length and tables. Changed only by the `BlockManager` that made it."""

    tables: list[list[BlockId]]  # per layer group
    length: int = 0  # tokens


class BlockManager:
    """Pools by layer group, and the tables of all sequences over them."""

    def __init__(self, *, num_blocks: list[int], block_size: int) -> None:
        """`num_blocks` has one entry per layer group; `block_size` is in tokens."""
        if block_size < 1:
            raise ConfigError(f"block_size must be at least 1 token, got {block_size}")
        self.block_size = block_size
        self.pools = [BlockPool(count) for count in num_blocks]
        self._live: set[Sequence] = set()

    def new_sequence(self) -> Sequence:
        """Start an empty sequence; it owns no blocks yet."""
        sequence = Sequence(tables=[[] for _ in self.pools])
        self._live.add(sequence)
        return sequence

    def blocks_needed(self, sequence: Sequence, count: int) -> int:
        """Blocks per layer group that `count` more tokens would take. Changes nothing."""
        have = len(sequence.tables[0])
        return max(0, -(-(sequence.length + count) // self.block_size) - have)

    def can_append(self, work: list[tuple[Sequence, int]]) -> bool:
        """True if `append(work)` would succeed now. Changes nothing."""
        need = sum(self.blocks_needed(sequence, count) for sequence, count in work)
        return all(pool.can_allocate(need) for pool in self.pools)

    def append(self, work: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Make room for new tokens: (sequence, count) each. Return their slots per layer group.

        All or nothing over all sequences and groups.

        Raises:
            OutOfBlocks: a pool has too few free blocks; nothing was taken.
        """
        assert all(sequence in self._live for sequence, _ in work), "a sequence was freed"
        assert len({id(sequence) for sequence, _ in work}) == len(work), "a sequence comes twice"
        needs = [self.blocks_needed(sequence, count) for sequence, count in work]
        for pool in self.pools:
            if not pool.can_allocate(sum(needs)):
                raise OutOfBlocks(
                    f"{sum(count for _, count in work)} more tokens need {sum(needs)} blocks of "
                    f"{self.block_size}, but only {pool.num_free} of {pool.num_blocks} are free; "
                    f"shorten or finish a sequence, or give the pool more memory"
                )
        slots: list[list[int]] = [[] for _ in self.pools]
        for (sequence, count), need in zip(work, needs, strict=True):
            start = sequence.length
            sequence.length += count
            for pool, table, group_slots in zip(self.pools, sequence.tables, slots, strict=True):
                table.extend(pool.allocate(need))
                group_slots.extend(
                    table[at // self.block_size] * self.block_size + at % self.block_size
                    for at in range(start, sequence.length)
                )
        return slots

    def free(self, sequence: Sequence) -> None:
        """Give back all blocks of a sequence; it can't be used any more."""
        assert sequence in self._live, "the sequence was freed already"
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            for block in table:
                pool.release(block)
            table.clear()
        sequence.length = 0
        self._live.discard(sequence)

    def check_integrity(self) -> None:
        """Raise AssertionError if tables and reference counts disagree anywhere."""
        for group, pool in enumerate(self.pools):
            pool.check_integrity()
            counted = [0] * pool.num_blocks
            for sequence in self._live:
                expected = -(-sequence.length // self.block_size)
                assert len(sequence.tables[group]) == expected, "a table has the wrong length"
                for block in sequence.tables[group]:
                    counted[block] += 1
            for i, count in enumerate(counted):
                assert pool.references(BlockId(i)) == count, f"block {i}: references and tables differ"
