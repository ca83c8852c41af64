"""The pool: which blocks of a layer group are free, and how often each live one is referenced."""

from collections import deque

from kvq.blockmgr.ids import BlockId
from kvq.errors import ConfigError, OutOfBlocks


class BlockPool:
    """Reference-counted blocks. Decides only; the bytes belong to `kvq.cache`."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ConfigError(f"a pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._free: deque[BlockId] = deque(BlockId(i) for i in range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that nobody references."""
        return len(self._free)

    @property
    def num_live(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - len(self._free)

    def can_allocate(self, count: int) -> bool:
        """True if `allocate(count)` would succeed now. Changes nothing."""
        return count <= len(self._free)

    def allocate(self, count: int) -> list[BlockId]:
        """Take `count` blocks, least recently freed first, each with one reference.

        All or nothing: a refused request leaves the pool unchanged.

        Raises:
            OutOfBlocks: fewer than `count` blocks are free.
        """
        if not self.can_allocate(count):
            raise OutOfBlocks(
                f"need {count} blocks, but only {len(self._free)} of {self.num_blocks} are free; "
                f"shorten or finish a sequence, or give the pool more memory"
            )
        taken = [self._free.popleft() for _ in range(count)]
        for block in taken:
            self._refs[block] = 1
        return taken

    def share(self, block: BlockId) -> None:
        """Add a reference to a live block."""
        self._check_live(block)
        self._refs[block] += 1

    def release(self, block: BlockId) -> None:
        """Drop a reference; the last one frees the block."""
        self._check_live(block)
        self._refs[block] -= 1
        if not self._refs[block]:
            self._free.append(block)

    def references(self, block: BlockId) -> int:
        """How often the block is referenced; 0 for a free one."""
        return self._refs[block]

    def check_integrity(self) -> None:
        """Raise AssertionError if a block is in two states or in none."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert all(refs >= 0 for refs in self._refs), "a reference count is negative"
        idle = {i for i, refs in enumerate(self._refs) if refs == 0}
        assert idle == free, f"unreferenced and free blocks differ: {sorted(idle ^ free)}"

    def _check_live(self, block: BlockId) -> None:
        assert 0 <= block < self.num_blocks, f"block {block} is outside the pool"
        assert self._refs[block] > 0, f"block {block} is free"
