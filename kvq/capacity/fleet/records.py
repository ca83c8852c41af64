"""Records of a simulated run, and the figures that summarize it.

Requests are stored as columns of numbers and histograms, so a million requests take little memory.
"""

from array import array
from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import sha256
from math import exp, isnan, log, nan
from typing import Any

from kvq.capacity.fleet.arrivals import Call
from kvq.capacity.plan.gpus import Prices

_BINS = 400  # per factor of e: a quarter of a percent each
_LEAST = -(1 << 30)  # the bin of zero
_RANKS = (50, 95, 99)


class _Histogram:
    """Histogram of non-negative numbers with logarithmic bins. Percentiles are accurate to 0.13%."""

    def __init__(self) -> None:
        self._counts = Counter[int]()
        self.count = 0
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value `times` times."""
        key = int(log(value) * _BINS // 1) if value > 0 else _LEAST
        self._counts[key] += times
        self.count += times
        self.total += value * times

    def merge(self, other: "_Histogram") -> None:
        """Add the counts of another histogram."""
        self._counts.update(other._counts)
        self.count += other.count
        self.total += other.total

    def percentile(self, rank: float) -> float | None:
        """Return the smallest value that at least `rank` percent of values don't exceed; None if empty."""
        left = self.count * rank / 100
        for key in sorted(self._counts):
            left -= self._counts[key]
            if left <= 0:
                return 0.0 if key == _LEAST else exp((key + 0.5) / _BINS)
        return None

    def items(self) -> list[tuple[int, int]]:
        """Return the sorted (bin, count) pairs, for comparing runs."""
        return sorted(self._counts.items())


def percentile(values: list[float], rank: float) -> float:
    """Return the smallest value that at least `rank` percent of the values don't exceed; 0.0 if empty."""
    ordered = sorted(values)
    return ordered[max(0, -int(-len(ordered) * rank // 100) - 1)] if ordered else 0.0


class Fate(IntEnum):
    """Outcome of a request."""

    OPEN = 0  # not finished yet
    SERVED = 1
    REFUSED = 2  # too large ever to fit
    FAILED = 3  # could not continue even with nothing else running, or its engine crashed
    OVERFLOWED = 4  # sent to an external API
    CANCELLED = 5  # its client disconnected


@dataclass(slots=True)
class Records:
    """Columns with one entry per request, indexed by its number. Times are in seconds; NaN means never."""

    arrival_s: "array[float]" = field(default_factory=lambda: array("d"))
    admitted_s: "array[float]" = field(default_factory=lambda: array("d"))  # when it first got blocks
    first_s: "array[float]" = field(default_factory=lambda: array("d"))  # when its first token was ready
    end_s: "array[float]" = field(default_factory=lambda: array("d"))
    prompt_tokens: "array[int]" = field(default_factory=lambda: array("I"))
    output_tokens: "array[int]" = field(default_factory=lambda: array("I"))
    cached_tokens: "array[int]" = field(default_factory=lambda: array("I"))  # of its prompt
    preemptions: "array[int]" = field(default_factory=lambda: array("I"))
    fate: "array[int]" = field(default_factory=lambda: array("I"))
    replica: "array[int]" = field(default_factory=lambda: array("I"))  # that served the request, or began to
    handovers: _Histogram = field(
        default_factory=_Histogram
    )  # gaps between tokens from two different replicas
    num_cut: int = 0  # requests that were truncated to the context

    def __len__(self) -> int:
        return len(self.arrival_s)

    def open(self, call: Call) -> None:
        """Add a row for a new request, under the next request number."""
        self.num_cut += call.is_cut
        self.arrival_s.append(call.arrival_s)
        for times in (self.admitted_s, self.first_s, self.end_s):
            times.append(nan)
        self.prompt_tokens.append(len(call.prompt))
        self.output_tokens.append(call.output_tokens)
        for counts in (self.cached_tokens, self.preemptions, self.fate, self.replica):
            counts.append(0)

    def begin(self, number: int, now: float) -> None:
        """Record a replica's first token for a request, which may follow a prefill replica's token."""
        if isnan(self.first_s[number]):
            self.first_s[number] = now
        else:
            self.handovers.add(now - self.first_s[number])

    def close(self, number: int, fate: Fate, now: float) -> None:
        """Record the end of a request."""
        assert self.fate[number] == Fate.OPEN, f"request {number} ended twice"
        self.fate[number] = fate
        self.end_s[number] = now

    def itl_s(self, number: int) -> float:
        """Return the mean time between a served request's tokens; 0 for a single token."""
        gaps = self.output_tokens[number] - 1
        return (self.end_s[number] - self.first_s[number]) / gaps if gaps else 0.0

    def is_within(self, number: int, ttft_s: float | None, itl_s: float | None) -> bool:
        """Return True if a served request's TTFT and mean ITL are within the limits; None: no limit."""
        ttft = self.first_s[number] - self.arrival_s[number]
        return (ttft_s is None or ttft <= ttft_s) and (itl_s is None or self.itl_s(number) <= itl_s)


@dataclass(slots=True)
class Gauges:
    """Totals of one replica over the run; `..._s` are integrals over time, in seconds."""

    steps: int = 0
    busy_s: float = 0.0
    running_s: float = 0.0  # number of sequences that got a token or were in prefill
    live_s: float = 0.0  # share of live blocks in the fullest layer group
    peak_live: float = 0.0
    peak_waiting: int = 0
    recomputed_tokens: int = 0
    slow_steps: int = 0
    restarts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    decodes: int = 0  # number of times a sequence advanced by a token plus accepted drafts
    decoded_tokens: int = 0  # total tokens of these advances
    gaps: _Histogram = field(default_factory=_Histogram)  # between tokens of a request


@dataclass(kw_only=True, slots=True)
class FleetRun:
    """Result of serving a load."""

    records: Records
    gauges: list[Gauges]  # of the replicas, prefill replicas first
    seconds: float  # from the first arrival to the last end

    @property
    def gaps(self) -> _Histogram:
        """Times between tokens, of all replicas."""
        gaps = _Histogram()
        for one in (self.records.handovers, *(gauges.gaps for gauges in self.gauges)):
            gaps.merge(one)
        return gaps

    @property
    def digest(self) -> str:
        """Digest of all results as 16 hexadecimal digits, equal for equal runs."""
        sha = sha256()
        records = self.records
        for times in (records.arrival_s, records.admitted_s, records.first_s, records.end_s):
            sha.update(times.tobytes())
        for counts in (records.cached_tokens, records.preemptions, records.fate, records.replica):
            sha.update(counts.tobytes())
        sha.update(repr([(g.steps, g.busy_s, g.live_s, g.gaps.items()) for g in self.gauges]).encode())
        return sha.hexdigest()[:16]


def summarize(
    run: FleetRun, *, ttft_slo_s: float | None = None, itl_slo_s: float | None = None
) -> dict[str, Any]:
    """Return figures keyed by name; times are in milliseconds, or None if nothing was measured.

    `ttft_slo_s`, `itl_slo_s`: latency limits of a request. Throughput and goodput cover the time from the
    first arrival to the last completion. `slo_met` is a share of all requests, except requests sent to an
    API or abandoned by their clients.
    """
    records, seconds = run.records, run.seconds
    served = [i for i, fate in enumerate(records.fate) if fate == Fate.SERVED]
    count = {fate: records.fate.count(fate) for fate in Fate if fate is not Fate.OPEN}
    met = sum([records.is_within(i, ttft_slo_s, itl_slo_s) for i in served])
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
    return {
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


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def costs(run: FleetRun, usd_per_hour: float, prices: Prices | None) -> dict[str, float | None]:
    """Return the costs of a run, in dollars.

    `usd_per_hour`: price of all GPUs. `prices`: prices of the overflow API, if there is one.
    """
    records = run.records
    gpus, api, outputs = usd_per_hour * run.seconds / 3600, 0.0, 0
    for fate, prompt, output in zip(records.fate, records.prompt_tokens, records.output_tokens, strict=True):
        if fate == Fate.OVERFLOWED and prices is not None:
            api += prices.request_usd(prompt, output)
        if fate == Fate.SERVED or (fate == Fate.OVERFLOWED and prices is not None):
            outputs += output
    return {
        "usd": gpus + api,
        "usd_gpus": gpus,
        "usd_api": api,
        "usd_per_million_tokens": 1e6 * (gpus + api) / outputs if outputs else None,
    }
