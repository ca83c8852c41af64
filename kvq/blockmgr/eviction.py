"""Eviction policies: the order in which a pool evicts its cached blocks.

`Blocks` uses `Segmented` for layer groups with a window and `LeastRecent` for the others. Of one sequence,
the deepest blocks are evicted first (`Blocks.release`).
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NewType

BlockId = NewType("BlockId", int)  # index of a block in the pool of its layer group

_MOST_PROTECTED = 0.75  # of a pool's blocks


class EvictionPolicy(ABC):
    """Cached blocks of one pool, in eviction order. All operations take O(1) time per block.

    A subclass defines the order. `BlockPool(num_blocks, policy=...)` takes the class.
    """

    add: Callable[[BlockId], object]  # called with every indexed block that lost its last reference

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks  # of the pool
        # Indexed blocks that were shared later; the pool maintains the set if a policy creates one.
        self.hits: set[BlockId] | None = None

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of cached blocks."""

    @abstractmethod
    def remove(self, block: BlockId) -> None:
        """Remove a block that is in use again or has left the prefix index."""

    @abstractmethod
    def pop(self, count: int) -> list[BlockId]:
        """Remove the next `count` blocks to evict, and return them in eviction order."""

    @abstractmethod
    def order(self) -> list[BlockId]:
        """Return all cached blocks in eviction order. Changes nothing."""

    def __iter__(self) -> Iterator[BlockId]:
        return iter(self.order())

    def check_integrity(self) -> None:
        """Raise AssertionError if a block is cached twice."""
        assert len(set(self.order())) == len(self), "a block is cached twice"


class LeastRecent(EvictionPolicy):
    """Policy that evicts the least recently used block first."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._blocks: OrderedDict[BlockId, None] = OrderedDict()
        self.add = self._blocks.setdefault  # no Python function in between: it runs for every freed block

    def __len__(self) -> int:
        return len(self._blocks)

    def remove(self, block: BlockId) -> None:
        del self._blocks[block]

    def pop(self, count: int) -> list[BlockId]:
        take = self._blocks.popitem
        return [take(last=False)[0] for _ in range(count)]

    def order(self) -> list[BlockId]:
        return list(self._blocks)

    def __iter__(self) -> Iterator[BlockId]:
        return iter(self._blocks)


class Segmented(EvictionPolicy):
    """Policy that evicts blocks without hits first, and the least recently used block within each segment.

    Blocks with hits are protected until they fill more than three quarters of the pool. After that, the least
    recently used of these blocks loses its protection.

    Source: Karedla, Love and Wherry, Caching Strategies to Improve Disk System Performance, 1994.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._probation: OrderedDict[BlockId, None] = OrderedDict()
        self._protected: OrderedDict[BlockId, None] = OrderedDict()
        self.hits: set[BlockId] = set()
        self.add = self._add

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def _add(self, block: BlockId) -> None:
        if block not in self.hits:
            self._probation[block] = None
            return
        self._protected[block] = None
        if len(self._protected) > _MOST_PROTECTED * self.num_blocks:
            oldest, _ = self._protected.popitem(last=False)
            self.hits.discard(oldest)
            self._probation[oldest] = None

    def remove(self, block: BlockId) -> None:
        del (self._protected if block in self._protected else self._probation)[block]

    def pop(self, count: int) -> list[BlockId]:
        return [(self._probation or self._protected).popitem(last=False)[0] for _ in range(count)]

    def order(self) -> list[BlockId]:
        return [*self._probation, *self._protected]

    def check_integrity(self) -> None:
        super().check_integrity()
        assert self._protected.keys() <= self.hits, "a block is protected without a hit"
