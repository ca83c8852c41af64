"""`kvq bench vllm`: kvq's formats in vLLM and vLLM's own KV cache, alternating in one process."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from kvq.bench.engine.load import LoadRequest, burst
from kvq.bench.engine.rivals import compare, one_by_one
from kvq.bench.engine.server import KvqServer
from kvq.bench.random_model import random_model
from kvq.bench.timing import in_turn, percentile, spread
from kvq.bench.vllm.engine import OWN, STEP_TOKENS, VllmServer
from kvq.engine import CompletionOutput, EngineConfig
from kvq.errors import ConfigError
from kvq.evals.watch import UNWATCHED, Watch
from kvq.models import Model
from kvq.models.loading.prepared import prepare
from kvq.models.model import load_prepared

_RANDOM = Path(__file__).with_name("random.json")  # a Llama with a few heads of 128 elements
WARM_UP = 4  # steps
CLOCKED = 8  # steps whose parts are timed, in a separate pass
_VLLM_BLOCK = 128  # tokens, on CPUs
_FEW, _FEW_TOKENS = 4, 8  # numbers of requests and output tokens compared before timing


@dataclass(frozen=True, kw_only=True, slots=True)
class _Load:
    """Load of equally long requests that all arrive at once.

    With `steps`, prompts are computed first, and a sample consists of that many steps, each with a token for
    every request. Otherwise, a sample is the entire load, including prompts.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    steps: int | None = None

    @property
    def name(self) -> str:
        """Name of the load in result rows."""
        if self.steps is None:
            return f"{self.requests} x {self.prompt_tokens}/{self.output_tokens}"
        return f"{self.requests} at depth {self.prompt_tokens}"

    @property
    def lasting_tokens(self) -> int:
        """Number of output tokens that keeps a request running until all steps are measured.

        The first requests already get tokens while the last prompts are computed.
        """
        computing = -(-self.requests * self.prompt_tokens // STEP_TOKENS) + self.requests
        return computing + WARM_UP + CLOCKED + self.output_tokens

    @property
    def tokens(self) -> int:
        """Maximum number of tokens of a finished request."""
        return self.prompt_tokens + self.lasting_tokens

    @property
    def sample_tokens(self) -> int:
        """Number of output tokens in a sample."""
        return self.requests * (self.output_tokens if self.steps is None else self.steps)

    @property
    def cache_tokens(self) -> int:
        """Number of tokens of all finished requests, rounded up to full blocks, plus a spare block each."""
        return self.requests * (-(-self.tokens // _VLLM_BLOCK) + 1) * _VLLM_BLOCK

    def draw(self, model: Model, repeat: int = 0) -> list[LoadRequest]:
        """Return the requests of one repeat.

        Raises:
            ConfigError: the model's context is too short.
        """
        prompt, output = (self.prompt_tokens,) * 2, (self.output_tokens,) * 2
        return burst(model, self.requests, prompt, output).draw(repeat)

    def lasting(self, model: Model) -> list[LoadRequest]:
        """Return the load's requests, with enough output tokens to keep running while steps are measured."""
        return [replace(one, output_tokens=self.lasting_tokens) for one in self.draw(model)]

    def few(self, model: Model) -> list[LoadRequest]:
        """Return a few requests to compare, with a similar total number of prompt tokens for every load."""
        count = max(1, min(_FEW, self.requests, 4096 // self.prompt_tokens))
        return [replace(one, output_tokens=_FEW_TOKENS) for one in self.draw(model)[:count]]


@dataclass(slots=True)
class _Entrant:
    """Engine with its figures, keyed by the name of the load."""

    engine: VllmServer
    alone: dict[str, list[CompletionOutput]]  # results of kvq's own engine, one by one
    checks: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)  # per sample
    parts: dict[str, dict[str, float]] = field(default_factory=dict)  # ms per decode step


def bench_vllm(
    model: Model, formats: Sequence[str], loads: Sequence[_Load], repeats: int, watch: Watch = UNWATCHED
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
def _entrants(model: Model, formats: Sequence[str], loads: Sequence[_Load]) -> Iterator[list[_Entrant]]:
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


def _limits(model: Model, loads: Sequence[_Load]) -> dict[str, Any]:
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


def _measure(model: Model, entrants: Sequence[_Entrant], shape: _Load, repeats: int) -> Iterator[None]:
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


def _running(engine: VllmServer, model: Model, shape: _Load) -> list[str]:
    """Start requests, and run until their prompts are computed and the warm-up steps are complete."""
    names = engine.fill(shape.lasting(model))
    engine.steps_s(WARM_UP, shape.requests)
    return names


def _burst_s(engine: VllmServer, requests: Sequence[LoadRequest]) -> float:
    begin = perf_counter()
    engine.finish(engine.add(requests))
    return perf_counter() - begin


def _rows(shape: _Load, entrants: Sequence[_Entrant]) -> list[dict[str, Any]]:
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


def make_loads(burst: Sequence[int], deep: Sequence[int], repeats: int) -> tuple[_Load, _Load]:
    """Return the burst, and the load at a depth, whose requests last for all repeats.

    `burst`: requests, prompt tokens, output tokens; `deep`: requests, depth, steps per sample.

    Raises:
        ConfigError: a load is empty.
    """
    if min(burst) < 1 or burst[2] < 2:
        raise ConfigError(f"--burst needs requests, prompts and 2 or more output tokens, got {tuple(burst)}")
    if min(deep) < 1:
        raise ConfigError(f"--deep needs requests, a depth and steps, got {tuple(deep)}")
    requests, depth, steps = deep
    return (
        _Load(requests=burst[0], prompt_tokens=burst[1], output_tokens=burst[2]),
        _Load(requests=requests, prompt_tokens=depth, output_tokens=repeats * steps, steps=steps),
    )


def require_context(loads: Sequence[_Load], most: int) -> None:
    """Raise ConfigError if requests would grow to more than `most` tokens."""
    for load in loads:
        if load.tokens > most:
            option = "--burst" if load.steps is None else "--deep"
            raise ConfigError(
                f"{option} {load.name}: requests grow to {load.tokens} tokens through all samples, the "
                f"model's context is {most}; give a smaller {option} or fewer --repeats"
            )


def make_model(folder: Path, dtype: str) -> Model:
    """Return a model with random weights, written to `folder` for vLLM."""
    config = json.loads(_RANDOM.read_text(encoding="utf-8"))
    random_model(config, folder, torch.device("cpu"), stored=True)
    return read_model(folder, dtype)


def read_model(folder: str | Path, dtype: str) -> Model:
    """Load a model from files that vLLM also reads.

    Raises:
        ModelError: the model is missing, damaged or not supported.
        ConfigError: the dtype is unknown.
    """
    prepared = prepare(folder, dtype=dtype)
    return load_prepared(prepared, prepared.recipe("auto"))
