"""vLLM's names, labels and buckets, for dashboards made for it.

Source: vllm/v1/metrics/loggers.py. Tokens, not blocks, are what `prefix_cache_queries` and `_hits` count.
"""

from collections.abc import Iterator, Mapping

from prometheus_client import Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvq.server.names.common import Histograms, Shape, Source, one_two_five

_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_LATENCY_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = one_two_five(2e6)
_SHAPES = {
    "ttft": Shape("vllm:time_to_first_token_seconds", "Time to the first token.", _TTFT_S),
    "itl": Shape("vllm:inter_token_latency_seconds", "Between neighbouring tokens.", _ITL_S),
    "e2e": Shape("vllm:e2e_request_latency_seconds", "Latency of whole requests.", _LATENCY_S),
    "queue": Shape("vllm:request_queue_time_seconds", "Time in the queue.", _LATENCY_S),
    "prefill": Shape("vllm:request_prefill_time_seconds", "Time in prefill.", _LATENCY_S),
    "decode": Shape("vllm:request_decode_time_seconds", "Time in decode.", _LATENCY_S),
    "prompt_tokens": Shape("vllm:request_prompt_tokens", "Prompt tokens of requests.", _TOKENS),
    "generated_tokens": Shape("vllm:request_generation_tokens", "Generated tokens of requests.", _TOKENS),
}
_COUNTERS = {
    "vllm:prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted requests."),
    "vllm:prompt_tokens_cached": ("cached_tokens", "Of these, found in the prefix index."),
    "vllm:generation_tokens": ("generated_tokens", "Tokens generated."),
    "vllm:num_preemptions": ("preemptions", "Preemptions."),
    "vllm:prefix_cache_queries": ("prompt_tokens", "Tokens looked up in the prefix index."),
    "vllm:prefix_cache_hits": ("cached_tokens", "Tokens found in the prefix index."),
}
_BLOCK_TIMES = {
    "lifetime": ("vllm:kv_block_lifetime_seconds", "Of indexed blocks."),
    "idle": ("vllm:kv_block_idle_before_evict_seconds", "From a block's last use to its eviction."),
    "reuse_gap": ("vllm:kv_block_reuse_gap_seconds", "Between uses of a block."),
}
_FAILED = {"cancelled": "abort", "error": "error"}  # by status; other requests end as their results do


class VllmNames:
    """`vllm:*`."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._labels = {"model_name": source.model, "engine": "0"}
        self._success = Counter(
            "vllm:request_success",
            "Results that ended, by how.",
            [*self._labels, "finished_reason"],
            registry=source.registry,
        )
        for reason in ("stop", "length", *_FAILED.values()):
            self._success.labels(*self._labels.values(), reason)
        self._histograms = Histograms(source.registry, _SHAPES, self._labels)

    def count(self, status: str) -> None:
        """A request ended."""
        if status in _FAILED:
            self.finish(_FAILED[status])

    def finish(self, reason: str) -> None:
        """A result ended."""
        self._success.labels(*self._labels.values(), reason).inc()

    def observe(self, values: Mapping[str, float]) -> None:
        """Durations and sizes."""
        self._histograms.observe(values)

    def families(self) -> Iterator[Metric]:
        """The engine's, as its last step left them."""
        source, totals = self._source, self._source.totals
        keys, values = list(self._labels), list(self._labels.values())
        for name, (counted, text) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=keys)
            counter.add_metric(values, totals.get(counted))
            yield counter
        for times, (name, text) in _BLOCK_TIMES.items():
            yield totals.histogram(times, name, text, self._labels)
        if (gauges := source.gauges) is None:
            return
        for name, text, value in (
            ("vllm:num_requests_running", "Requests with blocks.", gauges.running),
            ("vllm:num_requests_waiting", "Requests without.", gauges.waiting + gauges.preempted),
            ("vllm:kv_cache_usage_perc", "Of the pools' bytes, in live blocks; 1 is all.", source.kv_use()),
        ):
            gauge = GaugeMetricFamily(name, text, labels=keys)
            gauge.add_metric(values, value)
            yield gauge
