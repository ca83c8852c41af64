"""`kvq bench vllm`: kvq's formats inside vLLM beside vLLM's own KV cache, in turn within one process."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from kvq.bench.engine.engine import Keep, Progress
from kvq.bench.engine.load import LoadRequest
from kvq.bench.engine.rivals import compare, one_by_one
from kvq.bench.engine.server import KvqServer
from kvq.bench.engine.server import Limits as OwnLimits
from kvq.bench.timing import in_turn, percentile
from kvq.bench.vllm.engine import OWN, Limits, VllmEngine
from kvq.bench.vllm.load import CLOCKED, WARM_UP, Plan, Shape
from kvq.engine import CompletionOutput
from kvq.models import Model


@dataclass(slots=True)
class _Entrant:
    """An engine, and what was found of it under each load, by the load's name."""

    engine: VllmEngine
    alone: dict[str, list[CompletionOutput]]  # what kvq's own engine says, one by one
    checks: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)  # of samples
    parts: dict[str, dict[str, float]] = field(default_factory=dict)  # ms of a decode step


def bench_vllm(
    model: Model,
    formats: Sequence[str],
    plan: Plan,
    *,
    progress: Progress = lambda done, total: None,
    keep: Keep = lambda make: None,
) -> list[dict[str, Any]]:
    """Rows of vLLM's own cache and of all formats under both loads.

    Greedy tokens are first compared with those of kvq's own engine over the same format. Engines live side
    by side and take turns, so whatever the machine does besides meets all of them.

    Raises:
        ConfigError: a load's requests outgrow the model's context.
        EngineError: vLLM refuses a format, or gives other tokens than rounding explains.
    """
    plan.require_context(model.geometry.max_context)
    total = 2 * (1 + len(formats)) * (plan.repeats + 1)
    with _entrants(model, formats, plan) as entrants:

        def rows() -> list[dict[str, Any]]:
            return [row for shape in plan.shapes for row in _rows(shape, entrants)]

        done = 0
        for shape in plan.shapes:
            for _ in _measure(model, entrants, shape, plan.repeats):
                done += 1
                progress(done, total)
                keep(rows)
        return rows()


@contextmanager
def _entrants(model: Model, formats: Sequence[str], plan: Plan) -> Iterator[list[_Entrant]]:
    """All engines; kvq's own speaks before vLLM is there, which binds the threads of its process."""
    names = [OWN, *formats]
    few = {shape.name: shape.few(model) for shape in plan.shapes}
    alone = [
        {shape: _said(model, "auto" if kv == OWN else kv, requests) for shape, requests in few.items()}
        for kv in names
    ]
    limits = _limits(model, plan)
    with ExitStack() as stack:
        entrants = []
        for kv, said in zip(names, alone, strict=True):
            engine = VllmEngine(kv, model.prepared.source.folder, limits)
            stack.callback(engine.close)
            entrants.append(_Entrant(engine=engine, alone=said))
        yield entrants


def _said(model: Model, kv: str, requests: Sequence[LoadRequest]) -> list[CompletionOutput]:
    with closing(KvqServer(model, kv, OwnLimits(), requests)) as server:
        return one_by_one(server, requests)


def _limits(model: Model, plan: Plan) -> Limits:
    """Room for what unquantized KV of either load takes, for every engine."""
    dtype = model.prepared.dtype
    tokens = max(shape.cache_tokens for shape in plan.shapes)
    return Limits(
        dtype=str(dtype).removeprefix("torch."),
        kv_cache_memory_bytes=tokens * model.geometry.elements_per_token * dtype.itemsize,
        max_model_len=max(shape.tokens for shape in plan.shapes),
        max_num_seqs=max(shape.requests for shape in plan.shapes),
    )


def _measure(model: Model, entrants: Sequence[_Entrant], shape: Shape, repeats: int) -> Iterator[None]:
    """Check and warm up every engine, then sample them in turn, then time the parts of steps."""
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
        one.parts[shape.name] = _parts(one.engine, shape.requests)
        one.engine.drop(names)


def _running(engine: VllmEngine, model: Model, shape: Shape) -> list[str]:
    """Requests whose prompts are computed, some steps ago."""
    names = engine.fill(shape.lasting(model))
    engine.steps_s(WARM_UP, shape.requests)
    return names


def _burst_s(engine: VllmEngine, requests: Sequence[LoadRequest]) -> float:
    begin = perf_counter()
    engine.finish(engine.add(requests))
    return perf_counter() - begin


def _parts(engine: VllmEngine, requests: int) -> dict[str, float]:
    """Milliseconds that parts of a decode step take; the clocks between them cost a little."""
    with engine.clocks() as spent:
        total = engine.steps_s(CLOCKED, requests)
    spent = spent | {"other": total - sum(spent.values())}
    return {f"{name}_ms": 1e3 * seconds / CLOCKED for name, seconds in spent.items()}


def _rows(shape: Shape, entrants: Sequence[_Entrant]) -> list[dict[str, Any]]:
    """Of the engines that were sampled under a load. Rates are medians, and so is each one's lead."""
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
                "output_tokens_per_s": percentile(rates, 50),
                "output_tokens_per_s_p10": percentile(rates, 10),
                "output_tokens_per_s_p90": percentile(rates, 90),
                "times_own": percentile(leads, 50) if leads else None,
                **dict.fromkeys(("attention_ms", "write_ms", "other_ms")),
                **one.parts.get(shape.name, {}),
                "blocks": one.engine.num_blocks,
                **one.checks[shape.name],
            }
        )
    return rows
