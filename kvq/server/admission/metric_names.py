"""Names of metrics: kvq's native names, and the names used by common dashboards.

metric_names.json holds the naming schemes, each with the fields of `Names`, and the buckets of histograms:

- `kvq`: kvq's own names.
- `vllm`: vLLM's names, labels and buckets, for dashboards made for it, and for the Gateway API's inference
extension. `prefix_cache_queries` and `_hits` count tokens, not blocks. Sources: vllm/v1/metrics/loggers.py;
docs/proposals/003-model-server-protocol of kubernetes-sigs/gateway-api-inference-extension.
- `llm`: plain names, as in many small servers.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvq.errors import ConfigError, not_one_of


class _Named(NamedTuple):
    """Name, help text and labels of a metric, and its buckets if it is a histogram."""

    name: str
    text: str
    buckets: Sequence[float] = ()
    labels: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Names:
    """Naming scheme: the names of all metrics, under the same keys as the values in `Metrics`.

    `endings`: maps a request's outcome (success, error, cancelled, or the reason for refusal) and a result's
    "stop" or "length" to a value of the last label of `ends`. Other outcomes are not counted.
    """

    ends: _Named  # any label before the last is the model's name
    endings: Mapping[str, str]
    observed: Mapping[str, _Named]
    totals: Sequence[tuple[str, _Named]]
    gauges: Mapping[str, _Named]
    misses: _Named | None = None  # prefix misses, by cause
    block_times: Mapping[str, _Named] = field(default_factory=dict)
    labels: Mapping[str, str | None] = field(default_factory=dict)  # of all metrics; None: the model's name


def _read() -> dict[str, Names]:
    stored = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    buckets = stored.pop("buckets")

    def named(value: Any) -> Any:
        """Return a scheme's field with `_Named` in place of all objects that have a name."""
        if isinstance(value, list):
            return [named(one) for one in value]
        if not isinstance(value, dict):
            return value
        if "name" not in value:
            return {key: named(one) for key, one in value.items()}
        return _Named(**value | ({"buckets": buckets[value["buckets"]]} if "buckets" in value else {}))

    return {name: Names(**named(scheme)) for name, scheme in stored.items()}


ALL_NAMES = _read()


def parse_names(given: Iterable[str]) -> tuple[str, ...]:
    """Parse naming schemes from option values, each a comma-separated list; `kvq` is always included.

    Raises:
        ConfigError: a naming scheme is unknown.
    """
    wanted = {"kvq"} | {part.strip() for text in given for part in text.split(",") if part.strip()}
    for name in sorted(wanted - set(ALL_NAMES)):
        raise ConfigError(not_one_of("metrics names", name, ALL_NAMES))
    return tuple(name for name in ALL_NAMES if name in wanted)
