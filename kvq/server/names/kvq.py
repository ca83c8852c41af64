"""kvq's own names."""

from collections.abc import Iterator, Mapping

from prometheus_client import Counter
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)

from kvq.server.messages import Gauges, Ready
from kvq.server.names.common import Histograms, Shape, Source, one_two_five
from kvq.server.remote import State
from kvq.version import __version__

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
_LATENCY_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
_TOKENS = one_two_five(2e6)
_SHAPES = {
    "ttft": Shape("kvq_ttft_seconds", "From arrival at the engine to the first token.", _TTFT_S),
    "itl": Shape("kvq_itl_seconds", "Between neighbouring tokens of a request.", _ITL_S),
    "e2e": Shape("kvq_request_latency_seconds", "From arrival at the engine to the last token.", _LATENCY_S),
    "queue": Shape("kvq_queue_seconds", "From arrival at the engine to the first blocks.", _TTFT_S),
    "prefill": Shape("kvq_prefill_seconds", "From the first blocks to the first token.", _TTFT_S),
    "decode": Shape("kvq_decode_seconds", "From the first token to the last.", _LATENCY_S),
    "prompt_tokens": Shape("kvq_request_prompt_tokens", "Of requests that succeeded.", _TOKENS),
    "generated_tokens": Shape("kvq_request_generated_tokens", "Of requests that succeeded.", _TOKENS),
    "hit_ratio": Shape(
        "kvq_request_prefix_hit_ratio",
        "Prompt tokens found in the prefix index / prompt tokens.",
        (0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1),
    ),
}
_COUNTERS = {
    "preemptions": ("kvq_preemptions", "Requests that gave up their blocks."),
    "prompt_tokens": ("kvq_prompt_tokens", "Of admitted requests."),
    "cached_tokens": ("kvq_prompt_tokens_cached", "Of these, found in the prefix index."),
    "generated_tokens": ("kvq_tokens_generated", "Tokens generated."),
    "evictions": ("kvq_evictions", "Blocks that left the prefix index."),
    "refused_pins": ("kvq_pins_refused", "Pins left out since there was no room for more."),
}
# There from the start, so that rates are too.
_STATUSES = ("success", "error", "cancelled", "timeout", "invalid", "limited", "refused")


class KvqNames:
    """`kvq_*`."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._requests = Counter(
            "kvq_requests", "Requests that ended, by how.", ["status"], registry=source.registry
        )
        for status in _STATUSES:
            self._requests.labels(status)
        self._histograms = Histograms(source.registry, _SHAPES, {})

    def count(self, status: str) -> None:
        """A request ended."""
        self._requests.labels(status).inc()

    def finish(self, reason: str) -> None:
        """Not counted by reason."""

    def observe(self, values: Mapping[str, float]) -> None:
        """Durations and sizes."""
        self._histograms.observe(values)

    def families(self) -> Iterator[Metric]:
        """The engine's, as its last step left them."""
        source, remote = self._source, self._source.remote
        yield InfoMetricFamily("kvq_build", "Of this server.", {"version": __version__})
        ready = float(remote.state is State.READY)
        yield GaugeMetricFamily("kvq_engine_ready", "1 while the engine takes requests.", ready)
        yield CounterMetricFamily("kvq_engine_restarts", "Restarts of the engine.", remote.num_restarts)
        yield from self._totals()
        if source.info is not None:
            yield _engine(source.model, source.info)
            if source.gauges is not None:
                yield from _requests(source.gauges)
                yield from _memory(source.gauges, source.info)

    def _totals(self) -> Iterator[Metric]:
        totals = self._source.totals
        for key, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(name, text, totals.get(key))
        yield CounterMetricFamily(
            "kvq_recomputed_tokens", "Computed again after preemptions.", totals.recomputed_tokens
        )
        yield CounterMetricFamily("kvq_swapped_blocks", "Moved to host memory.", totals.swapped_blocks)
        for key, name, text in (
            ("lifetime", "kvq_block_lifetime_seconds", "From entering the prefix index to leaving it."),
            (
                "idle",
                "kvq_block_idle_before_evict_seconds",
                "From entering the prefix index, or being found there for the last time, to leaving it.",
            ),
            ("reuse_gap", "kvq_block_reuse_gap_seconds", "Between uses of an indexed block by sequences."),
        ):
            yield totals.histogram(key, name, text, {})


def _engine(model: str, info: Ready) -> Metric:
    return InfoMetricFamily(
        "kvq_engine",
        "What the engine runs; formats of several layer groups are joined by commas.",
        {
            "model": model,
            "kv": ",".join(dict.fromkeys(info.kv)),
            "block_size": str(info.shape.block_size),
            "max_context": str(info.max_context),
            "max_num_seqs": str(info.scheduler.max_num_seqs),
        },
    )


def _requests(gauges: Gauges) -> Iterator[Metric]:
    requests = GaugeMetricFamily("kvq_engine_requests", "Requests at the engine.", labels=["state"])
    for state in ("running", "waiting", "preempted"):
        requests.add_metric([state], getattr(gauges, state))
    yield requests
    depth = gauges.waiting + gauges.preempted
    yield GaugeMetricFamily("kvq_queue_depth", "Requests at the engine without blocks.", depth)
    yield GaugeMetricFamily("kvq_queued_prompt_tokens", "Of requests that wait.", gauges.queued_tokens)


def _memory(gauges: Gauges, info: Ready) -> Iterator[Metric]:
    blocks = GaugeMetricFamily("kvq_blocks", "Blocks of the pools.", labels=["group", "state"])
    sizes = GaugeMetricFamily("kvq_pool_bytes", "The pools' sizes.", labels=["group", "kv"])
    held: dict[tuple[str, str], int] = {}
    for group, (pool, kv, size) in enumerate(zip(gauges.pools, info.kv, info.block_bytes, strict=True)):
        sizes.add_metric([str(group), kv], pool.total * size)
        for state in ("free", "cached", "live"):
            count = getattr(pool, state)
            blocks.add_metric([str(group), state], count)
            held[kv, state] = held.get((kv, state), 0) + count * size
    yield blocks
    pinned = GaugeMetricFamily("kvq_blocks_pinned", "Live blocks under a pin.", labels=["group"])
    for group, count in enumerate(gauges.pinned):
        pinned.add_metric([str(group)], count)
    yield pinned
    yield sizes
    by_format = GaugeMetricFamily("kvq_kv_bytes", "The pools' bytes by format.", labels=["kv", "state"])
    for labels, value in held.items():
        by_format.add_metric(labels, value)
    yield by_format
    memory = GaugeMetricFamily(
        "kvq_engine_memory_bytes",
        "Held by the engine process, weights and pools included.",
        labels=["device"],
    )
    for device, value in gauges.memory.items():
        memory.add_metric([device], value)
    yield memory
