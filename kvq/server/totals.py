"""Counters that survive the engine process: what its earlier lives counted is added."""

from collections.abc import Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily

from kvq.server.messages import BlockTimes, Gauges, Spread, Stepped
from kvq.server.residency import BOUNDS_S

_OF_GAUGES = (
    "preemptions",
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "evictions",
    "refused_pins",
)
BLOCK_TIMES = ("lifetime", "idle", "reuse_gap")


class Totals:
    """Sums since the server's start. They never fall."""

    def __init__(self) -> None:
        self._before = dict.fromkeys(_OF_GAUGES, 0)  # of lives that ended
        self._now = dict.fromkeys(_OF_GAUGES, 0)
        self._life = 0
        self._spreads = {name: _empty() for name in BLOCK_TIMES}
        self.recomputed_tokens = 0
        self.swapped_blocks = 0

    def take(self, life: int, stepped: Stepped) -> None:
        """Add what a step counted, in the engine's `life`, a number that grows with every restart."""
        if life != self._life:
            self._before = {name: self.get(name) for name in _OF_GAUGES}
            self._life = life
        self._now = _counted(stepped.gauges)
        for ended in stepped.ended:
            if ended.receipt is not None:
                self.recomputed_tokens += ended.receipt.recomputed_tokens
                self.swapped_blocks += ended.receipt.swapped_blocks
        if stepped.block_times is not None:
            self._add(stepped.block_times)

    def get(self, name: str) -> int:
        """Preemptions, prompt_tokens, cached_tokens, generated_tokens, evictions or refused_pins."""
        return self._before[name] + self._now[name]

    def histogram(self, times: str, name: str, text: str, labels: dict[str, str]) -> HistogramMetricFamily:
        """One of `BLOCK_TIMES` under a name."""
        spread = self._spreads[times]
        bounds = [*(str(float(bound)) for bound in BOUNDS_S), "+Inf"]
        family = HistogramMetricFamily(name, text, labels=list(labels))
        buckets = [(le, float(n)) for le, n in zip(bounds, accumulate(spread.counts), strict=True)]
        family.add_metric(list(labels.values()), buckets, spread.total_s)
        return family

    def _add(self, times: BlockTimes) -> None:
        for name in BLOCK_TIMES:
            mine, new = self._spreads[name], getattr(times, name)
            self._spreads[name] = Spread(
                counts=_sums(mine.counts, new.counts), total_s=mine.total_s + new.total_s
            )


def _counted(gauges: Gauges) -> dict[str, int]:
    return {name: getattr(gauges, name) for name in _OF_GAUGES}


def _sums(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [x + y for x, y in zip(a, b, strict=True)]


def _empty() -> Spread:
    return Spread(counts=[0] * (len(BOUNDS_S) + 1), total_s=0.0)
