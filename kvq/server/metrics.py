"""What Prometheus scrapes at `/metrics`."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvq.server.messages import Ended, Stepped
from kvq.server.names import Names, Source, make_names
from kvq.server.names.common import values_of
from kvq.server.remote import Remote

_IGNORED = ("refused", "unknown", "label")  # there from the start, so that rates are too
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counts what happens, under every kind of names that was asked for."""

    def __init__(self, remote: Remote, model: str, kinds: Iterable[str] = ("kvq",)) -> None:
        """`model`: its name for clients; `kinds`: as `parse_names` gives them."""
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each that nobody draws
        self._registry = CollectorRegistry()
        self._source = Source(model, remote, self._registry)
        self._names = [make_names(kind, self._source) for kind in kinds]
        self._cuts = Counter(
            "kvq_slow_readers_cut", "Streams whose readers fell too far behind.", registry=self._registry
        )
        self._ignored = Counter(
            "kvq_requests_with_ignored_fields",
            "Requests with unknown fields: refused, answered without them, or answered and nothing is lost.",
            ["kind"],
            registry=self._registry,
        )
        for kind in _IGNORED:
            self._ignored.labels(kind)
        self._registry.register(_Read(self._names))
        remote.on_stepped = self._stepped

    def ended(self, ended: Ended) -> None:
        """A request ended at the engine."""
        failed = {"request": "invalid", "busy": "refused"}.get(ended.kind or "", "error")
        self.count("success" if ended.error is None else failed)
        values = values_of(ended)
        for names in self._names:
            names.observe(values)

    def count(self, status: str) -> None:
        """How a request ended: success, error, cancelled, timeout, or invalid, limited, refused before."""
        for names in self._names:
            names.count(status)

    def cut(self) -> None:
        """A stream's reader was too slow."""
        self._cuts.inc()

    def ignored(self, kind: str) -> None:
        """A request had unknown fields: refused, unknown, or label."""
        self._ignored.labels(kind).inc()

    def watch(self, name: str, what: str, read: Callable[[], float]) -> None:
        """A gauge of the HTTP process, read at every scrape."""
        Gauge(name, what, registry=self._registry).set_function(read)

    def text(self) -> bytes:
        """In Prometheus' format."""
        return generate_latest(self._registry)

    def _stepped(self, stepped: Stepped) -> None:
        """The engine did something."""
        self._source.totals.take(self._source.remote.num_restarts, stepped)
        reasons = [p.finish_reason for p in stepped.pieces if p.finish_reason in ("stop", "length")]
        for names in self._names:
            for gap in stepped.itl_s:
                names.observe({"itl": gap})
            for reason in reasons:
                names.finish(reason)


class _Read(Collector):
    """What is read at the moment of the scrape."""

    def __init__(self, names: list[Names]) -> None:
        self._names = names

    def collect(self) -> Iterator[Metric]:
        for names in self._names:
            yield from names.families()
