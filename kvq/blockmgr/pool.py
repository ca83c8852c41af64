"""The pool: which blocks of a layer group are free, cached or live; and the ids that stand for them."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NewType

from kvq.errors import ConfigError, OutOfBlocks

BlockId = NewType("BlockId", int)  # index of a block in the pool of its layer group
HostSlot = NewType("HostSlot", int)  # index of a block's place in host memory or a file


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolUsage:
    """The three gauges of one pool; they always add up to `total`."""

    free: int  # hold nothing
    cached: int  # hold indexed tokens that nobody uses now; given away when free blocks run out
    live: int  # referenced by sequences or pins
    total: int


_MOST_FAVOURED = 0.75  # of a pool's blocks

# Told the evicted blocks and their entries; returns cached blocks that nobody can find without them.
EvictionListener = Callable[[list[BlockId], list[object]], Iterable[BlockId]]


class BlockPool:
    """Reference-counted blocks. Decides only; the bytes belong to `kvq.cache`.

    A block with references is live. Without, it is cached if it was marked with an index entry by
    `keep`, else free. Every change of state is O(1) a block.
    """

    def __init__(
        self, num_blocks: int, *, on_evict: EvictionListener | None = None, favours_hits: bool = False
    ) -> None:
        """`favours_hits`: blocks that were shared once go after those that never were, whatever their age."""
        if num_blocks < 1:
            raise ConfigError(f"a pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._entries: list[object | None] = [None] * num_blocks  # what the index knows a block by
        self._free: deque[BlockId] = deque(BlockId(i) for i in range(num_blocks))
        self._cached: OrderedDict[BlockId, None] = OrderedDict()  # least recently used first
        self._favoured: OrderedDict[BlockId, None] = OrderedDict()  # cached ones that go after all those
        self._hit: set[BlockId] = set()  # blocks that were shared since they are indexed, if that counts
        self._favours_hits = favours_hits
        self._on_evict = on_evict

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks without references that hold indexed tokens."""
        return len(self._cached) + len(self._favoured)

    @property
    def num_live(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - self.num_available

    @property
    def num_available(self) -> int:
        """Blocks that an allocation could take: free and cached ones."""
        return len(self._free) + self.num_cached

    def usage(self) -> PoolUsage:
        """The three gauges."""
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

    def allocate(self, count: int) -> list[BlockId]:
        """Take `count` blocks, each with one reference: free ones first, least recently freed first.

        When they run out, the least recently used cached blocks leave the prefix index, here and
        nowhere else. All or nothing: a refused request leaves the pool unchanged.

        Raises:
            OutOfBlocks: too few blocks are free or cached.
        """
        self.check_room(count)
        free, refs = self._free, self._refs
        if count > len(free):
            self._evict(self._least_used(count - len(free)))
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
            self._uncache(block)
        if self._favours_hits and self._entries[block] is not None:
            self._hit.add(block)

    def release(self, block: BlockId) -> None:
        """Drop a reference; without any left, the block is cached if it is indexed, else free."""
        self.release_all((block,))

    def release_all(self, blocks: Iterable[BlockId]) -> None:
        """Drop one reference of each block, in order: what comes first is given away first."""
        refs, entries, cached = self._refs, self._entries, self._cached
        free = self._free.append
        for block in blocks:
            left = refs[block] - 1
            assert left >= 0, f"block {block} has no reference to release"
            refs[block] = left
            if left:
                continue
            if entries[block] is None:
                free(block)
            elif block in self._hit:
                self._favour(block)
            else:
                cached[block] = None

    def references(self, block: BlockId) -> int:
        """How often the block is referenced; 0 for a free or cached one."""
        return self._refs[block]

    def held(self) -> dict[BlockId, int]:
        """The live blocks and how often each is referenced."""
        return {BlockId(block): refs for block, refs in enumerate(self._refs) if refs}

    def entry(self, block: BlockId) -> object | None:
        """The index entry that the block was marked with, or None."""
        return self._entries[block]

    def every(self, stride: int) -> Iterable[tuple[int, int, object | None]]:
        """(block, references, index entry) of block 0 and every `stride`-th one after it."""
        return zip(
            range(0, self.num_blocks, stride), self._refs[::stride], self._entries[::stride], strict=True
        )

    def cached_blocks(self) -> list[BlockId]:
        """The cached blocks, least recently used first."""
        return [*self._cached, *self._favoured]

    def num_indexed(self) -> int:
        """Blocks with an index entry, live or cached. O(blocks)."""
        return self.num_blocks - self._entries.count(None)

    def is_writable(self, block: BlockId) -> bool:
        """True if exactly one sequence sees the block: one reference, and not indexed."""
        return self._refs[block] == 1 and self._entries[block] is None

    def keep(self, block: BlockId, entry: object) -> None:
        """Mark a live block as indexed: it stays cached when its last reference goes."""
        assert self._refs[block] > 0, f"block {block} is not live, it can't be indexed"
        assert self._entries[block] is None, f"block {block} is indexed already"
        self._entries[block] = entry

    def forget(self, block: BlockId) -> None:
        """Take a block out of the index: a live one stays with its holders, a cached one becomes free.

        Cached blocks that can't be found without it go with it.
        """
        if not self._refs[block]:
            self._uncache(block)
            self._evict([block])
            return
        entry, self._entries[block] = self._entries[block], None
        self._hit.discard(block)
        stranded = list(self._on_evict([block], [entry])) if self._on_evict is not None else []
        for other in stranded:
            self._uncache(other)
        self._evict(stranded)

    def drop_cached(self) -> None:
        """Evict every cached block."""
        blocks = self.cached_blocks()
        self._cached.clear()
        self._favoured.clear()
        self._evict(blocks)

    def grow(self, num_blocks: int) -> None:
        """Add free blocks up to `num_blocks`; the blocks there are keep their ids."""
        more = num_blocks - self.num_blocks
        if more < 0:
            raise ConfigError(f"a pool of {self.num_blocks} blocks can't shrink to {num_blocks}")
        self._free.extend(BlockId(i) for i in range(self.num_blocks, num_blocks))
        self._refs += [0] * more
        self._entries += [None] * more
        self.num_blocks = num_blocks

    def check_integrity(self) -> None:
        """Raise AssertionError if a block is in two states or in none."""
        free, cached = set(self._free), {*self._cached, *self._favoured}
        assert len(cached) == self.num_cached, "a block is cached twice"
        assert self._favoured.keys() <= self._hit, "a block is favoured that nobody shared"
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
        """Turn blocks that were just taken out of the cache into free ones.

        Cached blocks that can't be found without them go with them.
        """
        while blocks:
            known = self._entries
            entries = [known[block] for block in blocks]
            for block in blocks:
                known[block] = None
            self._hit.difference_update(blocks)
            self._free.extend(blocks)
            blocks = list(self._on_evict(blocks, entries)) if self._on_evict is not None else []
            for block in blocks:
                self._uncache(block)

    def _uncache(self, block: BlockId) -> None:
        """Take a block out of the cached ones."""
        if block in self._favoured:
            del self._favoured[block]
        else:
            del self._cached[block]

    def _favour(self, block: BlockId) -> None:
        """Keep a block longer than those that nobody shared, which have a quarter of the pool in any case."""
        self._favoured[block] = None
        if len(self._favoured) > _MOST_FAVOURED * self.num_blocks:
            oldest, _ = self._favoured.popitem(last=False)
            self._hit.discard(oldest)
            self._cached[oldest] = None

    def _least_used(self, count: int) -> list[BlockId]:
        """Take so many cached blocks out, in the order in which they are given away."""
        pools = self._cached, self._favoured
        return [(pools[0] or pools[1]).popitem(last=False)[0] for _ in range(count)]
