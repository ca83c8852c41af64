"""How long indexed blocks stay, and how soon they are used again, from the block manager's events."""

from bisect import bisect_left
from collections.abc import Callable
from time import monotonic

from kvq.blockmgr import BlockId, Event, Evicted, Found, Stored
from kvq.server.messages import BlockTimes, Spread

# vLLM's, so that its dashboards draw the same lines.
BOUNDS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800),
)


class Residency:
    """A subscriber to block events. O(1) an event, two numbers for every indexed block.

    A block is used when it enters the index and whenever a new sequence finds it; reading it in every
    step is not counted.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.evictions = 0
        self._clock = clock
        self._stored: dict[tuple[int, BlockId], float] = {}
        self._used: dict[tuple[int, BlockId], float] = {}
        self._lifetime, self._idle, self._gap = _Tally(), _Tally(), _Tally()
        self._is_new = False

    def __call__(self, event: Event) -> None:
        """Follow one event."""
        if isinstance(event, Stored):
            key = (event.group, event.block)
            self._stored[key] = self._used[key] = self._clock()
        elif isinstance(event, Found):
            key, now = (event.group, event.block), self._clock()
            self._gap.add(now - self._used[key])
            self._used[key] = now
            self._is_new = True
        elif isinstance(event, Evicted):
            key, now = (event.group, event.block), self._clock()
            self._lifetime.add(now - self._stored.pop(key))
            self._idle.add(now - self._used.pop(key))
            self.evictions += 1
            self._is_new = True

    def take(self) -> BlockTimes | None:
        """What was counted since the last call; None if nothing."""
        if not self._is_new:
            return None
        times = BlockTimes(
            lifetime=self._lifetime.spread(), idle=self._idle.spread(), reuse_gap=self._gap.spread()
        )
        self._lifetime, self._idle, self._gap = _Tally(), _Tally(), _Tally()
        self._is_new = False
        return times


class _Tally:
    """Counts by bucket."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds

    def spread(self) -> Spread:
        return Spread(counts=self.counts, total_s=self.total_s)
