"""`kvq bench vllm`: kvq's formats in vLLM and vLLM's own KV cache, alternating in one process."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from kvq.bench.engine.load import LoadRequest
from kvq.bench.engine.rivals import compare, one_by_one
from kvq.bench.engine.server import KvqServer
from kvq.bench.timing import in_turn, percentile, spread
from kvq.bench.vllm.engine import OWN, STEP_TOKENS, VllmServer
from kvq.bench.vllm.load import CLOCKED, WARM_UP, VllmLoad, require_context
from kvq.engine import CompletionOutput, EngineConfig
from kvq.evals.watch import UNWATCHED, Watch
from kvq.models import Model


@dataclass(slots=True)
class _Entrant:
    """Engine with its figures, keyed by the name of the load."""

    engine: VllmServer
    alone: dict[str, list[CompletionOutput]]  # results of kvq's own engine, one by one
    checks: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)  # per sample
    parts: dict[str, dict[str, float]] = field(default_factory=dict)  # ms per decode step


def bench_vllm(
    model: Model, formats: Sequence[str], loads: Sequence[VllmLoad], repeats: int, watch: Watch = UNWATCHED
) -> list[dict[str, Any]]:
    """Measure vLLM's own cache and all formats under each load, and return their rows.

    Greedy tokens are first compared with the tokens of kvq's own engine in the same format. All engines stay
    loaded and alternate, so other work on the machine affects them equally.

    Raises:
        ConfigError: a load's requests outgrow the model's context.
        EngineError: vLLM rejects a format, or generates tokens that rounding doesn't explain.
    """
    require_context(loads, model.geometry.max_context)
    total = len(loads) * (1 + len(formats)) * (repeats + 1)
    with _entrants(model, formats, loads) as entrants:

        def rows() -> list[dict[str, Any]]:
            return [row for shape in loads for row in _rows(shape, entrants)]

        done = 0
        for shape in loads:
            for _ in _measure(model, entrants, shape, repeats):
                done += 1
                watch.progress(done, total)
                watch.keep(rows)
        return rows()


@contextmanager
def _entrants(model: Model, formats: Sequence[str], loads: Sequence[VllmLoad]) -> Iterator[list[_Entrant]]:
    """Yield all engines. kvq's own engine runs before vLLM starts, since vLLM binds the process's threads."""
    names = [OWN, *formats]
    few = {shape.name: shape.few(model) for shape in loads}
    alone = [
        {name: kvq_outputs(model, "auto" if kv == OWN else kv, requests) for name, requests in few.items()}
        for kv in names
    ]
    limits = _limits(model, loads)
    with ExitStack() as stack:
        entrants = []
        for kv, outputs in zip(names, alone, strict=True):
            engine = VllmServer(kv, model.prepared.source.folder, limits)
            stack.callback(engine.close)
            entrants.append(_Entrant(engine=engine, alone=outputs))
        yield entrants


def kvq_outputs(model: Model, kv: str, requests: Sequence[LoadRequest]) -> list[CompletionOutput]:
    """Return the results of kvq's own engine, which runs one request after another."""
    with closing(KvqServer(model, kv, EngineConfig(), requests)) as server:
        return one_by_one(server, requests)


def _limits(model: Model, loads: Sequence[VllmLoad]) -> dict[str, Any]:
    """Return the limits of all engines, keyed by vLLM's names, with room for each load's unquantized KV."""
    dtype = model.prepared.dtype
    tokens = max(shape.cache_tokens for shape in loads)
    return {
        "dtype": str(dtype).removeprefix("torch."),  # dtype of weights and activations
        "kv_cache_memory_bytes": tokens * model.geometry.elements_per_token * dtype.itemsize,
        "max_model_len": max(shape.tokens for shape in loads),
        "max_num_seqs": max(shape.requests for shape in loads),
        "max_num_batched_tokens": STEP_TOKENS,
    }


def _measure(model: Model, entrants: Sequence[_Entrant], shape: VllmLoad, repeats: int) -> Iterator[None]:
    """Check and warm up all engines, sample them alternately, and time the parts of steps."""
    running: dict[int, list[str]] = {}
    for i, one in enumerate(entrants):
        few = shape.few(model)
        found = one.engine.finish(one.engine.add(few))
        name = f"{one.engine.name} {one.engine.kv}"
        one.checks[shape.name] = compare(name, model, one.alone[shape.name], found)
        if shape.steps is None:
            _burst_s(one.engine, shape.draw(model))
        else:
            running[i] = _running(one.engine, model, shape)
        yield
    for repeat, i in in_turn(range(len(entrants)), repeats):
        engine = entrants[i].engine
        seconds = (
            _burst_s(engine, shape.draw(model, repeat))
            if shape.steps is None
            else engine.steps_s(shape.steps, shape.requests)
        )
        entrants[i].seconds.setdefault(shape.name, []).append(seconds)
        yield
    for i, one in enumerate(entrants):
        names = running.get(i) or _running(one.engine, model, shape)
        with one.engine.clocks() as spent:  # the clocks themselves cost a little
            total = one.engine.steps_s(CLOCKED, shape.requests)
        spent = spent | {"other": total - sum(spent.values())}
        one.parts[shape.name] = {f"{name}_ms": 1e3 * seconds / CLOCKED for name, seconds in spent.items()}
        one.engine.drop(names)


def _running(engine: VllmServer, model: Model, shape: VllmLoad) -> list[str]:
    """Start requests, and run until their prompts are computed and the warm-up steps are complete."""
    names = engine.fill(shape.lasting(model))
    engine.steps_s(WARM_UP, shape.requests)
    return names


def _burst_s(engine: VllmServer, requests: Sequence[LoadRequest]) -> float:
    begin = perf_counter()
    engine.finish(engine.add(requests))
    return perf_counter() - begin


def _rows(shape: VllmLoad, entrants: Sequence[_Entrant]) -> list[dict[str, Any]]:
    """Return the rows of all engines measured under a load; rates and speedups are medians."""
    first = entrants[0].seconds.get(shape.name, [])
    rows = []
    for one in entrants:
        seconds = one.seconds.get(shape.name)
        if not seconds:
            continue
        rates = [shape.sample_tokens / s for s in seconds]
        leads = [own / mine for own, mine in zip(first, seconds, strict=False)]
        rows.append(
            {
                "load": shape.name,
                "name": one.engine.name,
                "kv": one.engine.kv,
                "samples": len(seconds),
                **spread("output_tokens_per_s", rates),
                "times_own": percentile(leads, 50) if leads else None,
                **dict.fromkeys(("attention_ms", "write_ms", "other_ms")),
                **one.parts.get(shape.name, {}),
                "blocks": one.engine.num_blocks,
                **one.checks[shape.name],
            }
        )
    return rows
