"""Plain names, as many small servers have them."""

from collections.abc import Iterator, Mapping

from prometheus_client import Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvq.server.names.common import Histograms, Shape, Source

_SHAPES = {
    "ttft": Shape("llm_ttft_seconds", "Time to the first token.", (0.1, 0.2, 0.5, 1, 2, 5, 10)),
    "e2e": Shape("llm_request_latency_seconds", "Latency of whole requests.", (0.5, 1, 2, 5, 10, 30, 60)),
}


class LlmNames:
    """`llm_*`."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._requests = Counter(
            "llm_requests", "Requests that ended, by how.", ["model", "status"], registry=source.registry
        )
        for status in ("success", "error"):
            self._requests.labels(source.model, status)
        self._histograms = Histograms(source.registry, _SHAPES, {})

    def count(self, status: str) -> None:
        """A request ended."""
        self._requests.labels(self._source.model, status).inc()

    def finish(self, reason: str) -> None:
        """Not counted by reason."""

    def observe(self, values: Mapping[str, float]) -> None:
        """Durations."""
        self._histograms.observe(values)

    def families(self) -> Iterator[Metric]:
        """The engine's, as its last step left them."""
        source = self._source
        yield CounterMetricFamily(
            "llm_tokens_generated", "Tokens generated.", source.totals.get("generated_tokens")
        )
        memory = GaugeMetricFamily("llm_gpu_memory_bytes", "Reserved on a GPU.", labels=["gpu_id"])
        if (gauges := source.gauges) is not None:
            for device, held in gauges.memory.items():
                if device.startswith("cuda:"):
                    memory.add_metric([device.removeprefix("cuda:")], held)
            yield GaugeMetricFamily("llm_active_requests", "Requests with blocks.", gauges.running)
            depth = gauges.waiting + gauges.preempted
            yield GaugeMetricFamily("llm_queue_depth", "Requests without.", depth)
            use = source.kv_use()
            yield GaugeMetricFamily("llm_kv_cache_utilization", "Of the pools' bytes, in live blocks.", use)
        yield memory
