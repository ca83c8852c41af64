"""Summary figures of a simulated run."""

from array import array
from dataclasses import dataclass
from typing import Any

from kvq.capacity.fleet.fleet import FleetRun
from kvq.capacity.fleet.records import Fate, Records, percentile
from kvq.capacity.plan.gpus import Prices

_RANKS = (50, 95, 99)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slo:
    """Latency limits that a request must keep to count as served well."""

    ttft_s: float | None = None
    itl_s: float | None = None  # on average over its tokens

    def is_met(self, records: Records, number: int) -> bool:
        """True if a request was served within the limits."""
        if records.fate[number] != Fate.SERVED:
            return False
        ttft = records.first_s[number] - records.arrival_s[number]
        return (self.ttft_s is None or ttft <= self.ttft_s) and (
            self.itl_s is None or records.itl_s(number) <= self.itl_s
        )


def summarize(
    run: FleetRun, slo: Slo, *, usd_per_hour: float | None = None, api: Prices | None = None
) -> dict[str, Any]:
    """Return figures by name; times in milliseconds, None where nothing was measured.

    `usd_per_hour`: of all GPUs together, for costs; `api`: for what overflows.

    Throughput and goodput are over the time from the first arrival to the last end. `slo_met` is a share
    of all requests but those that an API got or whose clients left.
    """
    records, seconds = run.records, run.seconds
    served = [i for i, fate in enumerate(records.fate) if fate == Fate.SERVED]
    count = {fate: records.fate.count(fate) for fate in Fate if fate is not Fate.OPEN}
    met = sum([slo.is_met(records, i) for i in served])
    asked = len(records) - count[Fate.OVERFLOWED] - count[Fate.CANCELLED]
    outputs = sum([records.output_tokens[i] for i in served])
    prompts = sum([records.prompt_tokens[i] for i in served])
    gauges = run.gauges
    cached = sum([records.cached_tokens[i] for i in served])

    def total(gauge: str) -> Any:
        return sum(getattr(one, gauge) for one in gauges)

    def per_second(amount: float) -> float:
        return amount / seconds if seconds > 0 else 0.0

    def waited(name: str, until: "array[float]") -> dict[str, float | None]:
        times = sorted([until[i] - records.arrival_s[i] for i in served])
        return {f"{name}_ms_p{n}": _ms(percentile(times, n) if times else None) for n in _RANKS}

    busy_s = total("busy_s")
    figures = {
        "requests": len(records),
        **{fate.name.lower(): number for fate, number in count.items()},
        "cut": records.num_cut,
        "seconds": seconds,
        "output_tokens_per_s": per_second(outputs),
        "total_tokens_per_s": per_second(outputs + prompts),
        "requests_per_s": per_second(len(served)),
        "goodput_requests_per_s": per_second(met),
        "slo_met": met / asked if asked else None,
        **waited("ttft", records.first_s),
        **{f"itl_ms_p{rank}": _ms(run.gaps.percentile(rank)) for rank in _RANKS},
        "handover_ms_p99": _ms(records.handovers.percentile(99)),
        **waited("queue", records.admitted_s),
        **waited("e2e", records.end_s),
        "preemptions": sum(records.preemptions),
        **{name: total(name) for name in ("slow_steps", "restarts", "recomputed_tokens", "steps")},
        **{name: total(name) for name in ("drafted_tokens", "accepted_tokens")},
        "tokens_per_step": total("decoded_tokens") / total("decodes") if total("decodes") else None,
        "prefix_hit_rate": cached / prompts if prompts else None,
        "utilization": per_second(busy_s / len(gauges)),
        "mean_batch": total("running_s") / busy_s if busy_s else None,
        "mean_pool": total("live_s") / busy_s if busy_s else None,
        "peak_pool": max(one.peak_live for one in gauges),
        "peak_waiting": max(one.peak_waiting for one in gauges),
        "digest": run.digest,
    }
    if usd_per_hour is not None:
        figures |= _costs(run, usd_per_hour, api, outputs)
    return figures


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _costs(
    run: FleetRun, usd_per_hour: float, prices: Prices | None, outputs: int
) -> dict[str, float | None]:
    records = run.records
    gpus = usd_per_hour * run.seconds / 3600
    api = 0.0
    for i, fate in enumerate(records.fate):
        if fate == Fate.OVERFLOWED and prices is not None:
            api += prices.request_usd(records.prompt_tokens[i], records.output_tokens[i])
            outputs += records.output_tokens[i]
    return {
        "usd": gpus + api,
        "usd_gpus": gpus,
        "usd_api": api,
        "usd_per_million_tokens": 1e6 * (gpus + api) / outputs if outputs else None,
    }
