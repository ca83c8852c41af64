"""Block pool: records which blocks of a layer group are free, cached or live."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvq.blockmgr.eviction import BlockId as BlockId
from kvq.blockmgr.eviction import EvictionPolicy, LeastRecent
from kvq.errors import ConfigError, OutOfBlocks


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolUsage:
    """Gauges of one pool. The three counts always add up to `total`."""

    free: int  # contain nothing
    cached: int  # contain indexed tokens that are not in use; evicted when free blocks run out
    live: int  # referenced by sequences or pins
    total: int


# Called with the evicted blocks and their entries; returns cached blocks that can't be found without these.
EvictionListener = Callable[[list[BlockId], list[object]], Iterable[BlockId]]


class BlockPool:
    """Allocator of blocks by reference count. It stores only the counts; the bytes belong to `kvq.cache`.

    A block with references is live. Without references, it is cached if `keep` marked it with an index
    entry, and free otherwise. Every state change is O(1) per block. `policy` orders the cached blocks.
    `relieve(count)` may make up to `count` blocks free before cached blocks are evicted.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        on_evict: EvictionListener | None = None,
        relieve: Callable[[int], object] | None = None,
        policy: type[EvictionPolicy] = LeastRecent,
    ) -> None:
        if num_blocks < 1:
            raise ConfigError(f"a pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._entries: list[object | None] = [None] * num_blocks  # the index entry of each block
        self._free: deque[BlockId] = deque(BlockId(i) for i in range(num_blocks))
        self._cached = policy(num_blocks)
        self._hits = self._cached.hits
        self._on_evict, self._relieve = on_evict, relieve

    @property
    def num_free(self) -> int:
        """Number of blocks that contain nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Number of blocks without references that contain indexed tokens."""
        return len(self._cached)

    @property
    def num_live(self) -> int:
        """Number of blocks with at least one reference."""
        return self.num_blocks - self.num_available

    @property
    def num_available(self) -> int:
        """Number of blocks that can be allocated: all free and cached blocks."""
        return len(self._free) + len(self._cached)

    def usage(self) -> PoolUsage:
        """Return the three gauges."""
        return PoolUsage(
            free=self.num_free, cached=self.num_cached, live=self.num_live, total=self.num_blocks
        )

    def check_room(self, count: int) -> None:
        """Raise OutOfBlocks unless `allocate(count)` would succeed now. Changes nothing."""
        if count > self.num_available:
            raise OutOfBlocks(
                f"need {count} blocks, but only {len(self._free)} of {self.num_blocks} are free and "
                f"{self.num_cached} cached; shorten or finish a sequence, or give the pool more memory"
            )

    def allocate(self, count: int) -> list[BlockId]:  # D54: a cached block leaves the index at once, 0.5 us
        """Allocate `count` blocks with one reference each. The free blocks released first are used first.

        When free blocks run out, cached blocks leave the prefix index in the order of the eviction policy.
        If there are too few blocks, nothing is allocated and the pool is unchanged.

        Raises:
            OutOfBlocks: too few blocks are free or cached.
        """
        free, refs = self._free, self._refs
        if count > len(free):
            self.check_room(count)
            if self._relieve is not None:
                self._relieve(count)
            if count > len(free):
                self._evict(self._cached.pop(count - len(free)))
        take = free.popleft
        taken = [take() for _ in range(count)]
        for block in taken:
            refs[block] = 1
        return taken

    def share(self, block: BlockId) -> None:
        """Add a reference to a live or cached block."""
        refs = self._refs[block]
        self._refs[block] = refs + 1
        if not refs:
            assert self._entries[block] is not None, f"block {block} is free, it can't be shared"
            self._cached.remove(block)
        if self._hits is not None and self._entries[block] is not None:
            self._hits.add(block)

    def release(self, block: BlockId) -> None:
        """Drop a reference. After the last one, the block becomes cached if it is indexed, otherwise free."""
        self.release_all((block,))

    def release_all(self, blocks: Iterable[BlockId]) -> None:
        """Drop one reference to each block, in order. The first blocks are also the first to be reused."""
        refs, entries = self._refs, self._entries
        free, cache = self._free.append, self._cached.add
        for block in blocks:
            left = refs[block] - 1
            assert left >= 0, f"block {block} has no reference to release"
            refs[block] = left
            if left:
                continue
            if entries[block] is None:
                free(block)
            else:
                cache(block)

    def references(self, block: BlockId) -> int:
        """Return the number of references to a block; 0 for a free or cached block."""
        return self._refs[block]

    def held(self) -> dict[BlockId, int]:
        """Return the live blocks with their reference counts."""
        return {BlockId(block): refs for block, refs in enumerate(self._refs) if refs}

    def entry(self, block: BlockId) -> object | None:
        """Return the index entry of a block, or None if it has none."""
        return self._entries[block]

    def every(self, stride: int) -> Iterable[tuple[int, int, object | None]]:
        """Return (block, references, index entry) for every `stride`-th block, starting with block 0."""
        return zip(
            range(0, self.num_blocks, stride), self._refs[::stride], self._entries[::stride], strict=True
        )

    def cached_blocks(self) -> list[BlockId]:
        """Return the cached blocks in eviction order."""
        return self._cached.order()

    def num_indexed(self) -> int:
        """Return the number of blocks with an index entry, live or cached. Takes O(blocks)."""
        return self.num_blocks - self._entries.count(None)

    def is_writable(self, block: BlockId) -> bool:  # D67: the index counts as a sharer
        """Return True if only one sequence sees the block: it has one reference and is not indexed."""
        return self._refs[block] == 1 and self._entries[block] is None

    def keep(self, block: BlockId, entry: object) -> None:
        """Mark a live block as indexed, so that it stays cached after its last reference is dropped."""
        assert self._refs[block] > 0, f"block {block} is not live, it can't be indexed"
        assert self._entries[block] is None, f"block {block} is indexed already"
        self._entries[block] = entry

    def forget(self, block: BlockId) -> None:
        """Remove a block from the index. A live block keeps its references, and a cached block becomes free.

        Cached blocks that can't be found without this block are evicted.
        """
        if not self._refs[block]:
            self._cached.remove(block)
            self._evict([block])
            return
        self._evict(self._unmark([block]))

    def take_out(self, blocks: list[BlockId]) -> None:
        """Remove cached blocks from the cache and the index without freeing them; `put_back` must follow."""
        for block in blocks:
            self._cached.remove(block)
        self._evict(self._unmark(blocks))

    def put_back(self, kept: list[BlockId], entry: object, free: list[BlockId]) -> None:
        """Return blocks after `take_out`: the first ones as cached blocks of `entry`, the others as free."""
        for block in kept:
            self._entries[block] = entry
            self._cached.add(block)
        self._free.extend(free)

    def free_cached(self, block: BlockId) -> None:
        """Free a cached block whose entry is in no index."""
        self._cached.remove(block)
        self._entries[block] = None
        self._free.append(block)

    def coldest(self) -> Iterator[BlockId]:
        """Iterate over the cached blocks in eviction order. The pool may not change meanwhile."""
        return iter(self._cached)

    def refresh(self, block: BlockId) -> None:
        """Make a cached block the last to be evicted."""
        self._cached.remove(block)
        self._cached.add(block)

    def drop_cached(self) -> None:
        """Evict every cached block."""
        self._evict(self._cached.pop(self.num_cached))

    def grow(self, num_blocks: int) -> None:
        """Add free blocks up to a total of `num_blocks`. Existing blocks keep their ids."""
        more = num_blocks - self.num_blocks
        if more < 0:
            raise ConfigError(f"a pool of {self.num_blocks} blocks can't shrink to {num_blocks}")
        self._free.extend(BlockId(i) for i in range(self.num_blocks, num_blocks))
        self._refs += [0] * more
        self._entries += [None] * more
        self.num_blocks = self._cached.num_blocks = num_blocks

    def check_integrity(self) -> None:
        """Raise AssertionError if a block is in two states or in no state."""
        self._cached.check_integrity()
        free, cached = set(self._free), set(self.cached_blocks())
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert min(self._refs) >= 0, "a reference count is negative"
        idle = {i for i, refs in enumerate(self._refs) if not refs}
        assert not free & cached, f"blocks are free and cached: {sorted(free & cached)}"
        assert idle == free | cached, (
            f"idle and free or cached blocks differ: {sorted(idle ^ (free | cached))}"
        )
        for block in free:
            assert self._entries[block] is None, f"block {block} is free and indexed"
        for block in cached:
            assert self._entries[block] is not None, f"block {block} is cached and not indexed"

    def _evict(self, blocks: list[BlockId]) -> None:
        """Free blocks that left the cache, and other cached blocks that can't be found without them."""
        while blocks:
            self._free.extend(blocks)
            blocks = self._unmark(blocks)

    def _unmark(self, blocks: list[BlockId]) -> list[BlockId]:
        """Remove blocks from the index. Return the other blocks that can no longer be found."""
        entries = [self._entries[block] for block in blocks]
        for block in blocks:
            self._entries[block] = None
        if self._hits is not None:
            self._hits.difference_update(blocks)
        stranded = list(self._on_evict(blocks, entries)) if self._on_evict is not None else []
        for block in stranded:
            self._cached.remove(block)
        return stranded
