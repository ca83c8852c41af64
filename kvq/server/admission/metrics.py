"""Prometheus metrics at `/metrics`; some are updated on events, others are read at every scrape.

To add a total of the engine, add a field to `kvq.server.engine.messages.Gauges`, which the worker fills, and
a name to `_ENGINE_TOTALS` and to metric_names.json.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvq.blockmgr import CAUSES
from kvq.server.admission.metric_names import ALL_NAMES, Names
from kvq.server.engine.messages import Ended, Gauges, Ready, Stepped
from kvq.server.engine.remote import Remote, State
from kvq.server.engine.residency import BOUNDS_S, BlockTimes
from kvq.version import __version__

Value = float | Mapping[tuple[str, ...], float]  # or one value for each combination of labels
_ENGINE_TOTALS = (
    *("preemptions", "prompt_tokens", "cached_tokens"),
    *("generated_tokens", "evictions", "refused_pins"),
    *("drafts", "drafted_tokens", "accepted_tokens"),
    *("dropped_blocks", "damaged_blocks", "packed_blocks", "prefetched_sessions"),
    *("kv_events", "dropped_kv_events"),
    *("guard_requests", "guard_tokens", "guard_same", "guard_alerts"),
)
_RECEIPT_TOTALS = ("recomputed_tokens", "restored_tokens", "host_tokens", "disk_tokens", "cold_tokens")
_OF_POOLS = ("free", "cached", "live")
_IGNORED = ("refused", "unknown", "label")  # all exist from the start, so that rates exist, too
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Source:
    """Source of the engine's gauges after its last step, and of totals since the server's start."""

    def __init__(self, model: str, remote: Remote) -> None:
        """`model`: the model's name for clients."""
        self.model = model
        self.block_times = BlockTimes()
        self._remote = remote
        # Counts of engine processes that ended, and of all receipts
        self._before: collections.Counter[str] = collections.Counter()
        self._now: dict[str, int] = {}  # counts of the current engine process
        self._life = 0

    def take(self, stepped: Stepped) -> None:
        """Add the counts of one step."""
        if self._life != self._remote.num_starts:
            self._before.update(self._now)
            self._life = self._remote.num_starts
        self._now = {name: getattr(stepped.gauges, name) for name in _ENGINE_TOTALS}
        self._now |= stepped.gauges.misses  # by cause
        for ended in stepped.ended:
            if ended.receipt is not None:
                for name in _RECEIPT_TOTALS:
                    self._before[name] += getattr(ended.receipt, name)
        if stepped.block_times is not None:
            self.block_times.add(stepped.block_times)

    def total(self, name: str) -> int:
        """Return the total `name`, which never decreases: `restarts`, or a count from gauges or receipts."""
        if name == "restarts":
            return self._remote.num_restarts
        return self._before[name] + self._now.get(name, 0)

    def read(self) -> dict[str, Value]:
        """Return the current values of the server and its engine."""
        info, is_ready = self._remote.info, self._remote.state is State.READY
        found: dict[str, Value] = {"version": {(__version__,): 1}, "is_ready": is_ready}
        if info is not None:
            numbers = (info.shape.block_size, info.max_context, info.scheduler.max_num_seqs)
            found["cache"] = {(str(info.shape.block_size), str(info.shape.num_blocks[0])): 1}
            found["engine"] = {(self.model, ",".join(dict.fromkeys(info.kv)), *map(str, numbers)): 1}
            if is_ready and self._remote.gauges is not None:
                found |= _of_gauges(self._remote.gauges, info)
        return found


def _of_gauges(gauges: Gauges, info: Ready) -> dict[str, Value]:
    groups = [str(group) for group in range(len(gauges.pools))]
    pools = list(zip(groups, gauges.pools, info.kv, info.block_bytes, strict=True))
    kv_bytes: collections.Counter[tuple[str, ...]] = collections.Counter()
    for _, pool, kv, size in pools:
        for state in _OF_POOLS:
            kv_bytes[kv, state] += getattr(pool, state) * size
    live_bytes = sum(held for (_, state), held in kv_bytes.items() if state == "live")
    gpus = {
        name.removeprefix("cuda:"): held for name, held in gauges.memory.items() if name.startswith("cuda:")
    }
    return {
        "running": gauges.running,
        "depth": gauges.waiting + gauges.preempted,  # requests without blocks
        "queued_tokens": gauges.queued_tokens,
        "requests": {(state,): getattr(gauges, state) for state in ("running", "waiting", "preempted")},
        "blocks": {(group, state): getattr(pool, state) for group, pool, *_ in pools for state in _OF_POOLS},
        "pinned": {(group,): count for group, count in zip(groups, gauges.pinned, strict=True)},
        "pool_bytes": {(group, kv): pool.total * size for group, pool, kv, size in pools},
        "kv_bytes": kv_bytes,
        "kv_use": live_bytes / sum(pool.total * size for _, pool, _, size in pools),
        "tier_bytes": {(tier,): held for tier, held in gauges.tier_bytes.items()},
        "guard_kl": {(depth,): kl for depth, kl in gauges.guard_kl.items()},
        "guard_fallback": gauges.guard_fallback,
        "formats": {(kv, what): n for kv, some in gauges.formats.items() for what, n in some.items()},
        "memory": {(device,): held for device, held in gauges.memory.items()},
        "gpu_memory": {(gpu,): held for gpu, held in gpus.items()},
    }


class Metrics:  # D331: totals are kept here: the engine may restart
    """Counters and gauges, exported under every enabled naming scheme."""

    def __init__(self, remote: Remote, model: str, kinds: Iterable[str] = ("kvq",)) -> None:
        """`model`: the model's name for clients; `kinds`: naming schemes, as `parse_names` returns them."""
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # a second, useless series for each metric
        self.registry = prometheus_client.CollectorRegistry()
        self._source = _Source(model, remote)
        self._named = [_Named(ALL_NAMES[kind], self._source, self.registry) for kind in kinds]
        self.cuts = prometheus_client.Counter(
            "kvq_slow_readers_cut", "Streams whose clients fell too far behind.", registry=self.registry
        )
        self.ignored = prometheus_client.Counter(
            "kvq_requests_with_ignored_fields",
            "Requests with unknown fields: refused, answered without them, or with mere labels.",
            ["kind"],
            registry=self.registry,
        )
        for kind in _IGNORED:
            self.ignored.labels(kind)
        remote.on_stepped = self._stepped
        # Called in the context of the request: with its outcome, and with the seconds to its first token
        self.on_ending: Callable[[str], object] | None = None
        self.on_ttft: Callable[[float], object] | None = None

    def ended(self, ended: Ended) -> None:
        """Count a request that ended at the engine."""
        if self.on_ttft is not None and (ttft_s := getattr(ended.timing, "ttft_s", None)) is not None:
            self.on_ttft(ttft_s)
        failed = {"request": "invalid", "busy": "refused"}.get(ended.kind or "", "error")
        self.count("success" if ended.error is None else failed)
        for key, value in _values_of(ended).items():
            self._observe(key, value)

    def count(self, ending: str) -> None:
        """Count an outcome: success, error, cancelled or timeout; invalid, limited or refused."""
        if self.on_ending is not None:
            self.on_ending(ending)
        for named in self._named:
            named.count(ending)

    def watch(self, name: str, what: str, read: Callable[[], float]) -> None:
        """Add a gauge of the HTTP process, whose value is read at every scrape."""
        prometheus_client.Gauge(name, what, registry=self.registry).set_function(read)

    def total(self, name: str) -> int:
        """Return a total of the engine since the server's start."""
        return self._source.total(name)

    def families(self) -> Iterable[Metric]:
        """Yield all metrics, each with its samples."""
        return self.registry.collect()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' format."""
        return prometheus_client.generate_latest(self.registry)

    def _observe(self, key: str, value: float) -> None:
        for named in self._named:
            named.observe(key, value)

    def _stepped(self, stepped: Stepped) -> None:
        self._source.take(stepped)
        for gap in stepped.itl_s:
            self._observe("itl", gap)
        for piece in stepped.pieces:
            if piece.finish_reason in ("stop", "length"):
                self.count(piece.finish_reason)


class _Named(Collector):
    """Metrics under one naming scheme."""

    def __init__(self, names: Names, source: _Source, registry: prometheus_client.CollectorRegistry) -> None:
        self._names = names
        self._source = source
        self._labels = {key: source.model if value is None else value for key, value in names.labels.items()}
        fixed = [*self._labels.values(), *[source.model] * (len(names.ends.labels) - 1)]
        ends = prometheus_client.Counter(
            names.ends.name, names.ends.text, [*self._labels, *names.ends.labels], registry=registry
        )
        self._ends = {ending: ends.labels(*fixed, value) for ending, value in names.endings.items()}
        self._observed: dict[str, prometheus_client.Histogram] = {}
        for key, (name, text, buckets, _) in names.observed.items():
            made = prometheus_client.Histogram(
                name, text, [*self._labels], buckets=buckets, registry=registry
            )
            self._observed[key] = made.labels(**self._labels) if self._labels else made
        registry.register(self)

    def count(self, ending: str) -> None:
        if ending in self._ends:
            self._ends[ending].inc()

    def observe(self, key: str, value: float) -> None:
        if key in self._observed:
            self._observed[key].observe(value)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that are read at every scrape."""
        names, labels, fixed = self._names, [*self._labels], [*self._labels.values()]
        for key, (name, text, *_) in names.totals:
            counter = CounterMetricFamily(name, text, labels=labels)
            counter.add_metric(fixed, self._source.total(key))
            yield counter
        if names.misses is not None:
            counter = CounterMetricFamily(*names.misses[:2], labels=[*labels, *names.misses.labels])
            for cause in CAUSES:
                counter.add_metric([*fixed, cause], self._source.total(cause))
            yield counter
        for key, (name, text, *_) in names.block_times.items():
            spread = getattr(self._source.block_times, key)
            counts = zip(map(str, (*map(float, BOUNDS_S), "+Inf")), accumulate(spread.counts), strict=True)
            histogram = HistogramMetricFamily(name, text, labels=labels)
            histogram.add_metric(fixed, [(le, float(count)) for le, count in counts], spread.total_s)
            yield histogram
        values = self._source.read()
        for key, (name, text, _, own) in names.gauges.items():
            if (value := values.get(key)) is not None:
                gauge = GaugeMetricFamily(name, text, labels=[*labels, *own])
                for given, one in ({(): value} if isinstance(value, int | float) else value).items():
                    gauge.add_metric([*fixed, *given], one)
                yield gauge


def _values_of(ended: Ended) -> dict[str, float]:
    """Return a request's durations in seconds and sizes in tokens; if the request failed, only its `ttft`."""
    times = {key: getattr(ended.timing, f"{key}_s", None) for key in ("ttft", "queue", "prefill", "e2e")}
    found = {key: value for key, value in times.items() if value is not None}
    if ended.error is not None or ended.receipt is None:
        return {"ttft": found["ttft"]} if "ttft" in found else {}
    receipt = ended.receipt
    if "e2e" in found and "ttft" in found:
        found["decode"] = found["e2e"] - found["ttft"]
    found["prompt_tokens"] = receipt.prompt_tokens
    found["generated_tokens"] = receipt.generated_tokens
    found["hit_ratio"] = receipt.cached_tokens / max(1, receipt.prompt_tokens)
    return found
