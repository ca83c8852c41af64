"""Block residency: lifetimes and reuse of indexed blocks, measured from the block manager's events."""

from bisect import bisect_left
from collections.abc import Callable
from time import monotonic

import msgspec

from kvq.blockmgr import BlockId, Event, Evicted, Found, Stored

# The same bounds as in vLLM, so that dashboards for vLLM work.
BOUNDS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800),
)


class _Spread(msgspec.Struct, kw_only=True):
    """Histogram of durations."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))  # last: longer
    total_s: float = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds


class BlockTimes(msgspec.Struct, kw_only=True):
    """Histograms of lifetime, idle time and reuse gap of indexed blocks."""

    lifetime: _Spread = msgspec.field(default_factory=_Spread)  # from entering the index to leaving it
    idle: _Spread = msgspec.field(default_factory=_Spread)  # from the last use to leaving the index
    reuse_gap: _Spread = msgspec.field(default_factory=_Spread)  # from a use to the next

    def add(self, other: "BlockTimes") -> None:
        """Add the counts of another instance."""
        for name in self.__struct_fields__:
            mine, new = getattr(self, name), getattr(other, name)
            mine.counts = [a + b for a, b in zip(mine.counts, new.counts, strict=True)]
            mine.total_s += new.total_s


class Residency:
    """Subscriber to block events; takes O(1) time per event, and stores two numbers per indexed block.

    A block counts as used when it enters the index and each time a new sequence finds it there; reads during
    steps are not counted.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.evictions = 0
        self._clock = clock
        self._stored: dict[tuple[int, BlockId], float] = {}
        self._used: dict[tuple[int, BlockId], float] = {}
        self._times = BlockTimes()
        self._is_new = False

    def __call__(self, event: Event) -> None:
        """Update the histograms with one event."""
        if isinstance(event, Stored):
            key = (event.group, event.block)
            self._stored[key] = self._used[key] = self._clock()
        elif isinstance(event, Found):
            key, now = (event.group, event.block), self._clock()
            self._times.reuse_gap.observe(now - self._used[key])
            self._used[key] = now
            self._is_new = True
        elif isinstance(event, Evicted):
            key, now = (event.group, event.block), self._clock()
            self._times.lifetime.observe(now - self._stored.pop(key))
            self._times.idle.observe(now - self._used.pop(key))
            self.evictions += 1
            self._is_new = True

    def take(self) -> BlockTimes | None:
        """Return the counts since the last call, or None if there are none."""
        if not self._is_new:
            return None
        times, self._times, self._is_new = self._times, BlockTimes(), False
        return times
