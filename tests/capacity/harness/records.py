"""What a simulation saw: one record per request, gauges per step, and figures over all of them."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from kvq.capacity.fleet.records import percentile


class Outcome(Enum):
    """How a request ended."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"  # its values could not be trusted, or it could not go on
    REFUSED = "refused"  # it could never fit, said when it was added


@dataclass(kw_only=True, slots=True)
class RequestRecord:
    """One request; times in seconds on the simulated clock."""

    number: int  # by arrival
    arrival_s: float
    tenant: str
    prompt_tokens: int
    outcome: Outcome | None = None  # None until it ended
    admitted_s: float | None = None  # when it got blocks first
    first_token_s: float | None = None
    last_token_s: float | None = None
    end_s: float | None = None
    tokens: int = 0  # generated, over all branches
    preemptions: int = 0
    cached_tokens: int = 0  # of the prompt, not computed
    recomputed_tokens: int = 0
    reason: str = ""  # why it failed or was refused


class Gauge(NamedTuple):
    """One step; without decodes and prefill tokens if nothing could run."""

    now_s: float  # when it began
    seconds: float
    running: int  # requests that hold blocks
    waiting: int  # requests that don't
    decodes: int
    prefill_tokens: int
    live: float  # live blocks / blocks, of the fullest layer group


@dataclass(kw_only=True, slots=True)
class SimulationResult:
    """What came of a simulation. Equal seeds and arguments give equal digests."""

    seed: int
    records: list[RequestRecord] = field(default_factory=list)
    gauges: list[Gauge] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)  # between tokens of a request's first branch
    seconds: float = 0.0  # simulated
    digest: str = ""  # of the whole trace of events
    kept: dict[str, int] = field(
        default_factory=dict
    )  # totals of what was kept beyond the pools, and came back

    def summary(self) -> dict[str, Any]:
        """Figures over all requests and steps; percentiles are 0.0 where there is nothing to count."""
        first = [r.first_token_s - r.arrival_s for r in self.records if r.first_token_s is not None]
        tokens = sum(record.tokens for record in self.records)
        steps = len(self.gauges)
        return {
            "steps": steps,
            "seconds": self.seconds,
            "requests": len(self.records),
            **{outcome.value: self.count(outcome) for outcome in Outcome},
            "tokens": tokens,
            "tokens_per_s": tokens / self.seconds if self.seconds else 0.0,
            **{f"ttft_p{rank}_s": percentile(first, rank) for rank in (50, 90, 99)},
            **{f"itl_p{rank}_s": percentile(self.gaps_s, rank) for rank in (50, 90, 99)},
            "preemptions": sum(record.preemptions for record in self.records),
            "cached_tokens": sum(record.cached_tokens for record in self.records),
            "recomputed_tokens": sum(record.recomputed_tokens for record in self.records),
            **self.kept,
            "mean_running": sum(gauge.running for gauge in self.gauges) / max(1, steps),
            "mean_live": sum(gauge.live for gauge in self.gauges) / max(1, steps),
        }

    def count(self, outcome: Outcome) -> int:
        """Requests that ended that way."""
        return sum(record.outcome is outcome for record in self.records)
