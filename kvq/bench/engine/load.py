"""Load of an engine benchmark: requests, their queue, and the results of serving them.

Results are summarized as rows of `kvq bench engine`.
"""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from kvq.bench.timing import percentile, spread
from kvq.capacity.lengths import Lengths
from kvq.errors import ConfigError, EngineError
from kvq.scheduler import Priority

if TYPE_CHECKING:  # clients of a server have no model
    from kvq.models import Model

_median = partial(percentile, percent=50)
_GROWTH = 1.03  # throughput is saturated if it grows by less from one concurrency to the next


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadRequest:
    """One request of a load."""

    index: int
    prompt: list[int]
    output_tokens: int
    arrival_s: float = 0.0  # relative to the start of the run; ignored in closed loops
    priority: Priority = Priority.INTERACTIVE

    @property
    def tokens(self) -> int:
        """Total number of prompt and output tokens."""
        return len(self.prompt) + self.output_tokens


def burst(model: "Model", requests: int, prompt: tuple[int, int], output: tuple[int, int]) -> "Load":
    """Return a load whose requests all arrive at once, with batch priority; lengths are (low, high)."""
    return Load(
        num_requests=requests,
        input_lengths=Lengths(low=prompt[0], high=prompt[1]),
        output_lengths=Lengths(low=output[0], high=output[1]),
        vocab_size=model.geometry.vocab_size,
        max_context=model.weights.max_context,
        priority=Priority.BATCH,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Load that generates random requests. Repeats differ in tokens, but not in lengths and arrivals."""

    num_requests: int
    input_lengths: Lengths
    output_lengths: Lengths
    vocab_size: int
    max_context: int  # tokens; log-normal lengths are clamped to this number
    rate: float = math.inf  # requests per second, with exponentially distributed gaps
    shared_prefix: float = 0.0  # share of each prompt that all requests have in common
    priority: Priority = Priority.INTERACTIVE
    seed: int = 0

    def __post_init__(self) -> None:
        longest = sum(n.high for n in (self.input_lengths, self.output_lengths))
        if longest > self.max_context:
            raise ConfigError(
                f"requests of up to {longest} tokens don't fit the model's context of {self.max_context}; "
                f"use a shorter --input-len or --output-len"
            )
        if not self.rate > 0:
            raise ConfigError(f"--rate must be above 0 requests per second, got {self.rate}")

    def draw(self, repeat: int) -> list[LoadRequest]:
        """Return the requests of one repeat, in order of arrival."""
        shape, ids = random.Random(self.seed), random.Random(f"{self.seed}/{repeat}")
        vocabulary = range(self.vocab_size)
        common = ids.choices(vocabulary, k=self.max_context) if self.shared_prefix else []
        requests, now = [], 0.0
        for index in range(self.num_requests):
            prompt_tokens = min(self.input_lengths.draw(shape), self.max_context - 1)
            output_tokens = min(self.output_lengths.draw(shape), self.max_context - prompt_tokens)
            prompt = common[: round(self.shared_prefix * prompt_tokens)]
            prompt += ids.choices(vocabulary, k=prompt_tokens - len(prompt))
            if math.isfinite(self.rate):
                now += shape.expovariate(self.rate)
            requests.append(
                LoadRequest(
                    index=index,
                    prompt=prompt,
                    output_tokens=output_tokens,
                    arrival_s=now,
                    priority=self.priority,
                )
            )
        return requests


class ArrivalQueue:
    """Queue of requests, each of which is due at its arrival time or, with `users`, when a user is free."""

    def __init__(self, requests: Sequence[LoadRequest], users: int | None) -> None:
        self._requests = requests
        self._users = users
        self._next = 0

    @property
    def is_done(self) -> bool:
        """True if every request has been returned."""
        return self._next == len(self._requests)

    def due(self, now: float, num_ended: int) -> list[tuple[LoadRequest, float]]:
        """Remove and return the due requests, each with its due time in seconds.

        `num_ended`: number of requests that have finished so far.
        """
        found = []
        while not self.is_done and self.wait_s(now, num_ended) <= 0:
            request = self._requests[self._next]
            self._next += 1
            found.append((request, request.arrival_s if self._users is None else now))
        return found

    def wait_s(self, now: float, num_ended: int) -> float:
        """Return the seconds until a request is due; infinite if none is left or all users are busy."""
        if self.is_done:
            return math.inf
        if self._users is None:
            return max(0.0, self._requests[self._next].arrival_s - now)
        return 0.0 if self._next - num_ended < self._users else math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """Served request, with the times of its tokens in seconds after the start of the run.

    Raises:
        EngineError: the number of tokens differs from the requested number.
    """

    request: LoadRequest
    due_s: float  # time at which the request arrived or its user became free
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
    """Result of one run of a load. Figures that a rival doesn't report are None."""

    served: list[Served]
    preemptions: int | None = None
    prefix_hit_rate: float | None = None  # prompt tokens found in the prefix index / prompt tokens
    peak_blocks: int | None = None  # live blocks in all layer groups
    pool_blocks: int | None = None
    pool_utilization: float | None = None  # median over time: filled slots / slots of live blocks

    @property
    def seconds(self) -> float:
        """Seconds from the first arrival to the last token."""
        return max(one.token_s[-1] for one in self.served) - min(one.due_s for one in self.served)

    @property
    def output_tokens_per_s(self) -> float:
        """Generated tokens of all requests per second, over the entire run."""
        return sum(one.request.output_tokens for one in self.served) / self.seconds

    @property
    def total_tokens_per_s(self) -> float:
        """Prompt tokens (including cached tokens) and output tokens per second, over the entire run."""
        return sum(one.request.tokens for one in self.served) / self.seconds

    @property
    def concurrency(self) -> float:
        """Average number of requests in the system."""
        return sum(one.token_s[-1] - one.due_s for one in self.served) / self.seconds


def row(name: str, kv: str, runs: Sequence[ServedLoad], users: int | None) -> dict[str, Any]:
    """Return one server's row for one load, summarizing all repeats.

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
    """Return True if throughput hardly grew in the last of a server's rows, sorted by concurrency."""
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
        f"{name}_ms_p{p}": 1e3 * percentile(seconds, p) if seconds else None  # single tokens have no ITL
        for p in (50, 95, 99)
    }
