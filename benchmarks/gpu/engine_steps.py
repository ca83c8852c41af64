"""Decode steps of the engine, a full batch at one depth: their time, its limit, and where it goes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from benchmarks.gpu.profile import profiled, summed_up
from kvq.bench.engine.load import Load, LoadRequest
from kvq.bench.engine.server import KvqServer
from kvq.bench.engine.step_costs import read_bytes
from kvq.bench.timing import percentile
from kvq.capacity.lengths import Lengths
from kvq.engine import EngineConfig, StepStats
from kvq.errors import EngineError, first_lines
from kvq.models import Model
from kvq.scheduler import Priority
from kvq.sizing.parameters import count_parameters

_WARM_UP = 8
_PROFILED = 8
_ROOM = 4  # tokens that requests have left when the last step was measured
_STEP_TOKENS = 8192


def bench_steps(
    model: Model, kv: str, *, batch: int, context: int, read_gb_per_s: float, steps: int = 48
) -> dict[str, Any]:
    """One row: `batch` sequences of about `context` tokens, decoding together.

    The limit is reading the weights and all K and V once. Steps are timed with nobody watching, then once
    more for what the host does in them, then, on a GPU, under torch's profiler.

    Raises:
        ConfigError: sequences longer than the model's context.
        OutOfMemory: the pool doesn't fit.
        EngineError: a request failed.
    """
    spent = _WARM_UP + 2 * steps + _PROFILED
    meanwhile = _ROOM + 2 * -(-batch * context // _STEP_TOKENS)  # the first decode while others are prefilled
    output = spent + meanwhile
    load = Load(
        num_requests=batch,
        input_lengths=Lengths(low=context, high=context),
        output_lengths=Lengths(low=output, high=output),
        vocab_size=model.geometry.vocab_size,
        max_context=model.weights.max_context,
        priority=Priority.BATCH,
    )
    requests = load.draw(0)
    limits = EngineConfig(max_num_seqs=batch, max_num_batched_tokens=_STEP_TOKENS, prefix_caching=False)
    with _opened(model, kv, limits, requests) as server:
        found = _measured(server, requests, steps)
    depth = context + meanwhile // 2 + _WARM_UP + steps // 2
    nbytes = read_bytes(model, count_parameters(model.prepared.config, model.geometry))
    nbytes += batch * depth * model.with_kv(kv).kv_bytes_per_token
    limit_ms = nbytes / read_gb_per_s / 1e6
    return {
        "name": "kvq",
        "kv": kv,
        "batch": batch,
        "context": context,
        "layers": len(model.geometry.layers),
        **found,
        "read_mb": nbytes / 1e6,
        "limit_ms": limit_ms,
        "fraction_of_limit": limit_ms / found["ms_median"],
    }


def _measured(server: KvqServer, requests: list[LoadRequest], steps: int) -> dict[str, Any]:
    """Return the measurements of the steps of one engine."""
    prefill_s = _prefill(server, requests)
    _step(server, _WARM_UP)
    times = _step(server, steps)
    row = {
        "prefill_s": prefill_s,
        "ms_median": percentile(times, 50),
        "ms_p10": percentile(times, 10),
        "ms_p90": percentile(times, 90),
        "tokens_per_s": 1e3 * len(requests) * len(times) / sum(times),
        **server.graphs,
        **_watched(server, steps, len(requests)),
        **_profile(server),
    }
    if row["gpu_busy_ms"] is not None:
        if not row["graph_launches"] and row["graph"]:
            row |= {"graph": False, "graph_reason": "none was replayed while steps were profiled"}
        row["gpu_idle_share"] = max(0.0, 1 - row["gpu_busy_ms"] / row["ms_median"])
    return row


@contextmanager
def _opened(model: Model, kv: str, limits: EngineConfig, requests: list[LoadRequest]) -> Iterator[KvqServer]:
    server = KvqServer(model, kv, limits, requests)
    try:
        yield server
    finally:
        server.close()


def _prefill(server: KvqServer, requests: list[LoadRequest]) -> float:
    """Seconds until every request decodes."""
    stats: list[StepStats] = []
    end = server.llm.on_step(stats.append)
    began = perf_counter()
    for request in requests:
        server.submit(request, 0.0, [])
    while not stats or stats[-1].prefill_tokens or stats[-1].decode_tokens < len(requests):
        if not server.llm.core.step():
            raise EngineError("requests ended before all of them decoded; does the pool hold them together?")
    end()
    return perf_counter() - began


def _step(server: KvqServer, count: int) -> list[float]:
    """Milliseconds of each of so many steps; each ends when its tokens are there."""
    times = []
    for _ in range(count):
        began = perf_counter()
        server.llm.core.step()
        times.append(1e3 * (perf_counter() - began))
    return times


def _watched(server: KvqServer, count: int, batch: int) -> dict[str, float]:
    """Milliseconds that the host takes for the parts of a step."""
    stats: list[StepStats] = []
    end = server.llm.on_step(stats.append)
    _step(server, count)
    end()
    if any(one.decode_tokens != batch or one.prefill_tokens for one in stats):
        raise EngineError("a request ended, or was preempted, while its steps were measured")
    parts: dict[str, Callable[[StepStats], float]] = {
        "scheduling_ms": lambda one: one.scheduling_s,
        "launching_ms": lambda one: one.forward_s,
        "choosing_ms": lambda one: one.sampling_s,  # the wait for the GPU is in it
    }
    return {name: 1e3 * percentile(map(part, stats), 50) for name, part in parts.items()}


def _profile(server: KvqServer) -> dict[str, Any]:
    """Return the GPU's work per step; on a CPU, or if the profiler fails, nothing and the reason."""
    model = server.llm.core.model
    if model.weights.device.type != "cuda":
        return {"gpu_busy_ms": None, "profile": "not on a GPU"}
    try:
        found = profiled(lambda: _step(server, _PROFILED))
    except (RuntimeError, AssertionError) as error:  # what torch raises where it can't watch a GPU
        return {"gpu_busy_ms": None, "profile": first_lines(error)}
    if not any(one.on_gpu for one in found):
        return {"gpu_busy_ms": None, "profile": "the profiler saw no kernel"}
    return summed_up(found, _PROFILED, len(model.geometry.layers))
