"""The figures of a simulated run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvq.capacity.fleet.fleet import Run
from kvq.capacity.fleet.histogram import percentile
from kvq.capacity.fleet.records import Fate, Records
from kvq.capacity.plan.cost import Prices
from kvq.errors import ConfigError

_RANKS = (50, 95, 99)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slo:
    """What a request must keep to count as served well."""

    ttft_s: float | None = None
    itl_s: float | None = None  # on average over its tokens

    def __post_init__(self) -> None:
        for name in ("ttft_s", "itl_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0 seconds, got {value}")

    def is_met(self, records: Records, number: int) -> bool:
        """By a request that was served."""
        if records.fate[number] != Fate.SERVED:
            return False
        ttft = records.first_s[number] - records.arrival_s[number]
        return (self.ttft_s is None or ttft <= self.ttft_s) and (
            self.itl_s is None or records.itl_s(number) <= self.itl_s
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Bill:
    """What running costs."""

    usd_per_hour: float  # of all GPUs together
    api: Prices | None = None  # for what overflows


def summarize(run: Run, slo: Slo, bill: Bill | None = None) -> dict[str, Any]:
    """Figures by name; times in milliseconds, None where there is nothing to tell.

    Throughput and goodput are over the time from the first arrival to the last end. `slo_met` is a share
    of all requests but those that an API got or whose clients left.
    """
    records, seconds = run.records, run.seconds
    served = [i for i, fate in enumerate(records.fate) if fate == Fate.SERVED]
    count = dict.fromkeys(Fate, 0)
    for fate in records.fate:
        count[Fate(fate)] += 1
    met = sum([slo.is_met(records, i) for i in served])
    asked = len(records) - count[Fate.OVERFLOWED] - count[Fate.CANCELLED]
    outputs = sum([records.output_tokens[i] for i in served])
    prompts = sum([records.prompt_tokens[i] for i in served])
    gauges = run.gauges
    cached = sum([records.cached_tokens[i] for i in served])
    itl = {f"itl_ms_p{rank}": _ms(run.gaps.percentile(rank)) for rank in _RANKS}

    def per_second(amount: float) -> float:
        return amount / seconds if seconds > 0 else 0.0

    figures = {
        "requests": len(records),
        "served": count[Fate.SERVED],
        "refused": count[Fate.REFUSED],
        "failed": count[Fate.FAILED],
        "overflowed": count[Fate.OVERFLOWED],
        "cancelled": count[Fate.CANCELLED],
        "cut": records.num_cut,
        "seconds": seconds,
        "output_tokens_per_s": per_second(outputs),
        "total_tokens_per_s": per_second(outputs + prompts),
        "requests_per_s": per_second(len(served)),
        "goodput_requests_per_s": per_second(met),
        "slo_met": met / asked if asked else None,
        **_times("ttft", [records.first_s[i] - records.arrival_s[i] for i in served]),
        **itl,
        "handover_ms_p99": _ms(run.handovers.percentile(99)),
        **_times("queue", [records.admitted_s[i] - records.arrival_s[i] for i in served]),
        **_times("e2e", [records.end_s[i] - records.arrival_s[i] for i in served]),
        "preemptions": sum(records.preemptions),
        "slow_steps": sum(one.slow_steps for one in gauges),
        "restarts": sum(one.restarts for one in gauges),
        "recomputed_tokens": sum(one.recomputed_tokens for one in gauges),
        "prefix_hit_rate": cached / prompts if prompts else None,
        "utilization": sum(one.busy_s for one in gauges) / (len(gauges) * seconds) if seconds > 0 else 0.0,
        "mean_batch": _mean([one.running_s for one in gauges], [one.busy_s for one in gauges]),
        "mean_pool": _mean([one.live_s for one in gauges], [one.busy_s for one in gauges]),
        "peak_pool": max(one.peak_live for one in gauges),
        "peak_waiting": max(one.peak_waiting for one in gauges),
        "steps": sum(one.steps for one in gauges),
        "digest": run.digest,
    }
    if bill is not None:
        figures |= _costs(run, bill, outputs)
    return figures


def _times(name: str, seconds: list[float]) -> dict[str, float | None]:
    """Percentiles in milliseconds."""
    seconds.sort()
    return {f"{name}_ms_p{rank}": _ms(percentile(seconds, rank) if seconds else None) for rank in _RANKS}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _mean(sums: Sequence[float], weights: Sequence[float]) -> float | None:
    return sum(sums) / sum(weights) if sum(weights) else None


def _costs(run: Run, bill: Bill, outputs: int) -> dict[str, float | None]:
    records = run.records
    gpus = bill.usd_per_hour * run.seconds / 3600
    api = 0.0
    for i, fate in enumerate(records.fate):
        if fate == Fate.OVERFLOWED and bill.api is not None:
            api += bill.api.request_usd(records.prompt_tokens[i], records.output_tokens[i])
            outputs += records.output_tokens[i]
    return {
        "usd": gpus + api,
        "usd_gpus": gpus,
        "usd_api": api,
        "usd_per_million_tokens": 1e6 * (gpus + api) / outputs if outputs else None,
    }
