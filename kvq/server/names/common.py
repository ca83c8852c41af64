"""What all kinds of names are made from."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import Metric

from kvq.server.messages import Ended, Gauges, Ready
from kvq.server.remote import Remote, State
from kvq.server.totals import Totals


@dataclass(frozen=True, slots=True)
class Source:
    """Where values come from when somebody asks."""

    model: str  # as clients name it
    remote: Remote
    registry: CollectorRegistry
    totals: Totals = field(default_factory=Totals)

    @property
    def gauges(self) -> Gauges | None:
        """Where the engine stands; None while there is none."""
        return self.remote.gauges if self.remote.state is State.READY else None

    @property
    def info(self) -> Ready | None:
        """What the engine said of itself, as long as it was ready once."""
        return self.remote.info

    def kv_use(self) -> float:
        """Bytes of live blocks / bytes of all blocks."""
        gauges, info = self.gauges, self.info
        if gauges is None or info is None:
            return 0.0
        pairs = list(zip(gauges.pools, info.block_bytes, strict=True))
        return sum(p.live * size for p, size in pairs) / sum(p.total * size for p, size in pairs)


class Names(Protocol):
    """All metrics under one kind of names."""

    def __init__(self, source: Source) -> None: ...

    def count(self, status: str) -> None:
        """A request ended: success, error, cancelled, or why it was not taken."""

    def finish(self, reason: str) -> None:
        """A result ended by itself: "stop" or "length"."""

    def observe(self, values: Mapping[str, float]) -> None:
        """Durations and sizes, by the keys of `values_of`, and "itl"."""

    def families(self) -> Iterator[Metric]:
        """What is read when somebody asks."""


class Shape(NamedTuple):
    """A histogram: its name, what it says, its buckets."""

    name: str
    text: str
    buckets: Sequence[float]


class Histograms:
    """Histograms by what they count, with the same labels."""

    def __init__(self, registry: CollectorRegistry, shapes: Mapping[str, Shape], labels: dict[str, str]):
        self._by_key: dict[str, Histogram] = {}
        for key, shape in shapes.items():
            made = Histogram(
                shape.name, shape.text, list(labels), buckets=tuple(shape.buckets), registry=registry
            )
            self._by_key[key] = made.labels(**labels) if labels else made

    def observe(self, values: Mapping[str, float]) -> None:
        """Count those values that there is a histogram for."""
        for key, value in values.items():
            if (histogram := self._by_key.get(key)) is not None:
                histogram.observe(value)


def values_of(ended: Ended) -> dict[str, float]:
    """Durations in seconds and sizes in tokens of a request that ended; of a failed one only its `ttft`."""
    times = {key: getattr(ended.timing, f"{key}_s", None) for key in ("ttft", "queue", "prefill", "e2e")}
    found = {key: value for key, value in times.items() if value is not None}
    if ended.error is not None or ended.receipt is None:
        return {"ttft": found["ttft"]} if "ttft" in found else {}
    receipt = ended.receipt
    if "e2e" in found and "ttft" in found:
        found["decode"] = found["e2e"] - found["ttft"]
    found["prompt_tokens"] = receipt.prompt_tokens
    found["generated_tokens"] = receipt.generated_tokens
    found["hit_ratio"] = receipt.cached_tokens / max(1, receipt.prompt_tokens)
    return found


def one_two_five(limit: float) -> list[float]:
    """1, 2, 5, 10, 20, ... up to `limit`."""
    steps = (mantissa * 10.0**power for power in range(12) for mantissa in (1, 2, 5))
    return [step for step in steps if step <= limit]
