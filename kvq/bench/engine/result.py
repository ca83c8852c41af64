"""Results of serving a load: the times of every request, and their summary as rows of `kvq bench engine`."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvq.bench.engine.load import LoadRequest
from kvq.bench.timing import percentile, spread
from kvq.errors import EngineError

_median = partial(percentile, percent=50)
_GROWTH = 1.03  # throughput that grows less from one concurrency to the next is saturated


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """Request that was served, with the times of its tokens in seconds after the start of the run.

    Raises:
        EngineError: the number of tokens is not the requested one.
    """

    request: LoadRequest
    due_s: float  # when it arrived, or its user was free
    token_s: list[float]
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if len(self.token_s) != self.request.output_tokens:
            raise EngineError(
                f"a request for {self.request.output_tokens} tokens ended after {len(self.token_s)}"
            )

    @property
    def ttft_s(self) -> float:
        """Seconds from arrival to the first token, including any wait before admission."""
        return self.token_s[0] - self.due_s

    @property
    def itl_s(self) -> list[float]:
        """Seconds between successive tokens."""
        return [after - before for before, after in itertools.pairwise(self.token_s)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedLoad:
    """Result of one run over a load. Figures that a rival doesn't report are None."""

    served: list[Served]
    preemptions: int | None = None
    prefix_hit_rate: float | None = None  # prompt tokens found in the prefix index / prompt tokens
    peak_blocks: int | None = None  # live, over all layer groups
    pool_blocks: int | None = None
    pool_utilization: float | None = None  # median over time: filled slots / slots of live blocks

    @property
    def seconds(self) -> float:
        """Seconds from the first arrival to the last token."""
        return max(one.token_s[-1] for one in self.served) - min(one.due_s for one in self.served)

    @property
    def output_tokens_per_s(self) -> float:
        """Generated tokens of all requests over the whole run."""
        return sum(one.request.output_tokens for one in self.served) / self.seconds

    @property
    def total_tokens_per_s(self) -> float:
        """Tokens of prompts and outputs, cached prompt tokens included, over the whole run."""
        return sum(one.request.tokens for one in self.served) / self.seconds

    @property
    def concurrency(self) -> float:
        """Requests in the system on average."""
        return sum(one.token_s[-1] - one.due_s for one in self.served) / self.seconds


def row(name: str, kv: str, runs: Sequence[ServedLoad], users: int | None) -> dict[str, Any]:
    """Return one server's row for one load over all repeats.

    Rates are medians over repeats; latencies are percentiles over the requests or tokens of all repeats.
    """
    served = [one for run in runs for one in run.served]
    first, last = runs[0], runs[-1]
    return {
        "name": name,
        "kv": kv,
        "requests": len(first.served),
        "repeats": len(runs),
        "concurrency": users or round(_median(run.concurrency for run in runs), 1),
        **spread("output_tokens_per_s", [run.output_tokens_per_s for run in runs]),
        "total_tokens_per_s": _median(run.total_tokens_per_s for run in runs),
        "seconds": _median(run.seconds for run in runs),
        **_latencies("ttft", [one.ttft_s for one in served]),
        **_latencies("itl", [gap for one in served for gap in one.itl_s]),
        "preemptions": None if first.preemptions is None else _median(run.preemptions or 0 for run in runs),
        "prefix_hit_rate": last.prefix_hit_rate,
        "peak_blocks": None if first.peak_blocks is None else max(run.peak_blocks or 0 for run in runs),
        "pool_blocks": first.pool_blocks,
        "pool_utilization": last.pool_utilization,
    }


def is_saturated(rows: Sequence[dict[str, Any]]) -> bool:
    """Return True if the last of one server's rows, in order of concurrency, brought no more throughput."""
    rates = [row["output_tokens_per_s"] for row in rows]
    return len(rates) > 1 and rates[-1] < _GROWTH * max(rates[:-1])


def mark(rows: Sequence[dict[str, Any]], *, ttft_ms: float | None, itl_ms: float | None) -> None:
    """Mark each server's saturation point, and its fastest row whose 99th percentiles meet the SLO."""
    for name, kv in {(row["name"], row["kv"]) for row in rows}:
        mine = [row for row in rows if (row["name"], row["kv"]) == (name, kv)]
        mine.sort(key=lambda row: row["concurrency"])
        if is_saturated(mine):
            max(mine[:-1], key=lambda row: row["output_tokens_per_s"])["is_saturation"] = True
        if ttft_ms is None and itl_ms is None:
            continue
        kept = [row for row in mine if _is_within(row, "ttft", ttft_ms) and _is_within(row, "itl", itl_ms)]
        if kept:
            max(kept, key=lambda row: row["output_tokens_per_s"])["is_best_within_slo"] = True


def _is_within(row: dict[str, Any], name: str, limit_ms: float | None) -> bool:
    value = row[f"{name}_ms_p99"]
    return limit_ms is None or value is None or value <= limit_ms


def _latencies(name: str, seconds: list[float]) -> dict[str, float | None]:
    return {
        f"{name}_ms_p{p}": 1e3 * percentile(seconds, p) if seconds else None  # outputs of one token: no ITL
        for p in (50, 95, 99)
    }
