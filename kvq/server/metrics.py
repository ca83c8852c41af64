"""What Prometheus scrapes at `/metrics`."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvq.server.messages import Ended, Gauges
from kvq.server.remote import Remote, State

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_LATENCY_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counts what ends; reads where the engine stands when it is asked."""

    def __init__(self, remote: Remote) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "kvq_requests", "Requests that ended, by how.", ["status"], registry=self._registry
        )
        self._ttft = Histogram(
            "kvq_ttft_seconds", "Time to the first token.", buckets=_TTFT_S, registry=self._registry
        )
        self._latency = Histogram(
            "kvq_request_latency_seconds",
            "From arrival at the engine to the last token.",
            buckets=_LATENCY_S,
            registry=self._registry,
        )
        self._cuts = Counter(
            "kvq_slow_readers_cut", "Streams whose readers fell too far behind.", registry=self._registry
        )
        self._registry.register(_Engine(remote))

    def ended(self, ended: Ended) -> None:
        """A request ended at the engine."""
        self.count("success" if ended.error is None else "error")
        if ended.ttft_s is not None:
            self._ttft.observe(ended.ttft_s)
        if ended.error is None and ended.e2e_s is not None:
            self._latency.observe(ended.e2e_s)

    def count(self, status: str) -> None:
        """A request ended: success, error, cancelled, refused."""
        self._requests.labels(status).inc()

    def cut(self) -> None:
        """A stream's reader was too slow."""
        self._cuts.inc()

    def text(self) -> bytes:
        """In Prometheus' format."""
        return generate_latest(self._registry)


class _Engine(Collector):
    """The engine's gauges, as its last step left them."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        remote = self._remote
        ready = float(remote.state is State.READY)
        yield GaugeMetricFamily("kvq_engine_ready", "1 while the engine takes requests.", ready)
        yield CounterMetricFamily("kvq_engine_restarts", "Restarts of the engine.", remote.num_restarts)
        if remote.gauges is not None:
            yield from _of_step(remote.gauges)


def _of_step(gauges: Gauges) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
    requests = GaugeMetricFamily("kvq_engine_requests", "Requests at the engine.", labels=["state"])
    for state in ("running", "waiting", "preempted"):
        requests.add_metric([state], getattr(gauges, state))
    yield requests
    blocks = GaugeMetricFamily("kvq_blocks", "Blocks of the pools.", labels=["group", "state"])
    for group, pool in enumerate(gauges.pools):
        for state in ("free", "cached", "live"):
            blocks.add_metric([str(group), state], getattr(pool, state))
    yield blocks
    yield GaugeMetricFamily("kvq_queued_prompt_tokens", "Of requests that wait.", gauges.queued_tokens)
    # Totals of this life of the engine: a restart begins at 0, which is what Prometheus expects of counters.
    yield CounterMetricFamily("kvq_preemptions", "Requests that gave up their blocks.", gauges.preemptions)
    yield CounterMetricFamily("kvq_prompt_tokens", "Of admitted requests.", gauges.prompt_tokens)
    yield CounterMetricFamily(
        "kvq_prompt_tokens_cached", "Of these, found in the prefix index.", gauges.cached_tokens
    )
    yield CounterMetricFamily("kvq_tokens_generated", "Tokens generated.", gauges.generated_tokens)
