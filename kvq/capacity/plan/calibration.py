"""Efficiencies of an engine as a benchmark measured them, relative to a GPU's data sheet."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvq import strict_json
from kvq.capacity.plan.gpus import Gpu
from kvq.capacity.plan.roofline import Efficiency
from kvq.errors import ConfigError

_KEYS = {"linear", "read_s", "pair_s", "sequence_s", "weight_bytes", "token_flops", "kv_bytes", "pair_flops"}


def read_efficiency(path: Path, gpu: Gpu, kv: str) -> Efficiency:
    """Of a KV format, from the results of `kvq bench engine --json`.

    Raises:
        ConfigError: no such file or format, or what was measured is faster than the data sheet allows.
    """
    try:
        data = strict_json.read(path)
        rows = data["rows"]
        costs = {row["kv"]: row["step_costs"] for row in rows if row.get("step_costs")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} has no results of kvq bench engine: {error!r}") from error
    if kv not in costs:
        known = ", ".join(costs) or "none"
        raise ConfigError(f"{path} has no costs of steps with KV in {kv}, only of {known}")
    if not isinstance(costs[kv], Mapping) or set(costs[kv]) != _KEYS or not costs[kv]["linear"]:
        raise ConfigError(f"{path}: the costs of steps must have {', '.join(sorted(_KEYS))}")
    return efficiency(costs[kv], gpu, source=str(path))


def efficiency(costs: Mapping[str, Any], gpu: Gpu, *, source: str) -> Efficiency:
    """What of a GPU's data sheet was reached.

    `costs`: seconds of steps' linear layers by their tokens (`linear`, [tokens, s] each), of a token of KV
    that a decode reads, of a pair in prefill, of a sequence; and what those parts read and compute.
    """
    bandwidth, flops = gpu.bandwidth, 1e12 * gpu.tflops["fp16"]

    def ideal(tokens: int) -> float:
        return float(max(costs["weight_bytes"] / bandwidth, costs["token_flops"] * tokens / flops))

    try:
        return Efficiency(
            measured=tuple((int(tokens), ideal(tokens) / seconds) for tokens, seconds in costs["linear"]),
            kv=_share(costs["kv_bytes"] / bandwidth, costs["read_s"]),
            attention=_share(costs["pair_flops"] / flops, costs["pair_s"]),
            sequence_s=costs["sequence_s"],
        )
    except (ConfigError, TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"{source} does not fit the data sheet of {gpu.name}: {error}") from error


def _share(ideal_s: float, measured_s: float) -> float:
    """At most all of it: what is a small part of every step may come out as less than it can be."""
    return min(1.0, ideal_s / measured_s) if measured_s else 1.0
