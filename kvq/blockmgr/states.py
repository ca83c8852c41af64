"""Recurrent states, kept as blocks of a separate layer group.

A sequence has one such block for the state after all its tokens; the block moves from index to index of the
table as the sequence grows. At the end of some full blocks, the block stays behind as a snapshot that the
index can find, and the sequence continues in another block. Indices without a block are holes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvq.blockmgr.pool import BlockId, BlockPool
from kvq.blockmgr.sequence import HOLE, Sequence, StateMove

# D64: snapshots at prompts' ends and every 256 tokens
SNAPSHOT_EVERY = 256  # tokens


@dataclass(frozen=True, slots=True)
class _StateStep:
    """Changes to a table's state entries during one append."""

    targets: list[int]  # indices of the blocks to write, in order; all but the last are snapshots
    copies: bool  # the state is shared, in the middle of a block, and must be copied first
    moves: bool  # the state's current block is written again, at the same index or a later one

    @property
    def need(self) -> int:
        """Number of blocks to allocate, not counting the copy."""
        return len(self.targets) - self.moves


@dataclass(frozen=True, kw_only=True, slots=True)
class States:  # D63: recurrent states are blocks of a group whose window is 2
    """Rules for the layer group of recurrent states."""

    group: int
    pool: BlockPool
    block_size: int  # tokens
    every: int  # tokens between snapshots, in addition to the one at the end of a prompt

    def keeps(self, sequence: Sequence, index: int) -> bool:
        """Return True if the state after a full block is kept and indexed."""
        if sequence.tail is None or not sequence.indexing:
            return False
        end = (index + 1) * self.block_size
        return index == sequence.tail or end % self.every == 0 or end == sequence.adopted

    def step(self, sequence: Sequence, count: int, *, snapshots: bool) -> _StateStep:
        """Return how appending `count` tokens changes the entries, with or without new snapshots."""
        size, start = self.block_size, sequence.length
        last, first = (start + count - 1) // size, start // size
        between = range(first, last) if snapshots else ()
        targets = [i for i in between if self.keeps(sequence, i)] + [last]
        if not start:
            return _StateStep(targets, copies=False, moves=False)
        block = sequence.tables[self.group][-1]
        if start % size:
            return _StateStep(targets, copies=not self.pool.is_writable(block), moves=True)
        if snapshots:
            is_free = self.pool.is_writable(block) and not self.keeps(sequence, first - 1)
        else:
            is_free = self.pool.references(block) == 1
        return _StateStep(targets, copies=False, moves=is_free)

    def extend(self, sequence: Sequence, count: int, step: _StateStep, fresh: Iterator[BlockId]) -> None:
        """Apply the changes to the entries, after any copy, and record the reads and writes in `move`."""
        size, start, table = self.block_size, sequence.length, sequence.tables[self.group]
        end = start + count
        source = table[-1] if start else HOLE
        last = len(table) - 1
        table.extend([HOLE] * (step.targets[-1] - last))
        if step.moves:
            if start % size == 0 and self.pool.entry(source) is not None:
                self.pool.forget(source)
            table[last] = HOLE
        blocks = [source] if step.moves else []
        blocks += [next(fresh) for _ in range(step.need)]
        for index, block in zip(step.targets, blocks, strict=True):
            table[index] = block
        ends = [(index + 1) * size for index in step.targets[:-1]] + [end]
        begins = [start, *ends[:-1]]
        pieces = [(b - a, block) for a, b, block in zip(begins, ends, blocks, strict=True)]
        sequence.move = StateMove(start=start, source=source, pieces=pieces)

    def first_needed(self, sequence: Sequence, first: int) -> int:
        """Return the index of the first block to keep. Snapshots are indexed before they are released."""
        if sequence.tail is None or not sequence.indexing:
            return first
        return min(first, sequence.depth)

    def can_rewind(self, sequence: Sequence, length: int, *, is_due: bool) -> bool:
        """Return True if the state after `length` tokens is stored, or if `is_due` is set and `length` falls
        within the last block."""
        if length in (0, sequence.length):
            return True
        move = sequence.move
        if move is not None and move.start == length:
            return True
        shares_block = (length - 1) // self.block_size == (sequence.length - 1) // self.block_size
        if is_due and move is not None and move.start < length and shares_block:
            return True
        if length > sequence.committed or length % self.block_size:
            return False
        return sequence.holds(self.group, length // self.block_size - 1)

    def rewind(self, sequence: Sequence, length: int) -> None:
        """Move the block back to where it was before an append that was never run, if the block was moved."""
        move, table, index = sequence.move, sequence.tables[self.group], (length - 1) // self.block_size
        if move is None or not length or move.start != length or table[index] != HOLE:
            return
        table[table.index(move.source, sequence.starts[self.group])] = HOLE
        table[index] = move.source
        sequence.starts[self.group] = min(sequence.starts[self.group], index)
