"""Capacity plan, made by `kvq.plan`: how a GPU's memory is used, and how many users fit.

This module also computes plans at other context lengths and numbers of users, for plots. What a GPU holds
besides the pool is in memory.py; `GPU_FRACTION` in kvq.sizing.pools limits the engine's share of free memory.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypedDict, Unpack

from kvq.arguments import checked
from kvq.capacity.lengths import Demand, Length, fixed
from kvq.capacity.plan.gpus import Gpu, check_positive, find_gpu, usd_per_million
from kvq.capacity.plan.memory import Engine, Users
from kvq.capacity.plan.step_time import Efficiency, StepTime, roofline
from kvq.capacity.plan.target import Target, make_target
from kvq.capacity.plan.vllm import VllmEngine
from kvq.errors import ConfigError
from kvq.sizing.held import AUTO
from kvq.sizing.memory import Split, Term, kv_layout, split_geometry

_SHORTEST = 1024  # tokens, in plots


@dataclass(frozen=True, kw_only=True, slots=True)
class _Serving:
    """Latency and throughput of `users` concurrent requests."""

    users: int
    ttft_s: float  # for a prompt that is computed alone, without queueing
    itl_s: float
    tokens_per_s: float  # of all users together
    requests_per_s: float


def closed_loop(*, users: int, step_s: float, prefill_s: float, output_tokens: float) -> _Serving:
    """Return the speed if a new prompt replaces every finished request and is computed while the others wait.

    By Little's law, `users` = requests per second x seconds per request.
    """
    per_token_s = step_s + users * prefill_s / output_tokens  # between two tokens for one user
    return _Serving(
        users=users,
        ttft_s=prefill_s + step_s,
        itl_s=per_token_s,
        tokens_per_s=users / per_token_s,
        requests_per_s=users / per_token_s / output_tokens,
    )


def serving(time: StepTime, demand: Demand, users: int) -> _Serving:
    """Return the speed of `users` concurrent requests, averaged over lengths, with shared prefixes cached."""
    lengths = demand.lengths
    halfway = [x.prompt + x.output // 2 for x in lengths]
    seen = [users * tokens / len(lengths) for tokens in time.seen(halfway)]
    step = time.linear_s(users) + users * time.sequence_s
    step += sum(each * tokens for each, tokens in zip(time.read_s, seen, strict=True))
    prompt = fmean([time.prompt_s(int(x.prompt * demand.prefix_share), x.prompt) for x in lengths])
    output = max(1.0, fmean([float(x.output) for x in lengths]))
    return closed_loop(users=users, step_s=step, prefill_s=prompt, output_tokens=output)


def at_rate(serve: Callable[[int], _Serving], rate: float, *, most: int) -> _Serving | None:
    """Return the speed at `rate` requests per second, or None if `most` concurrent requests can't keep up.

    This is the speed at the smallest concurrency whose throughput reaches the rate, which is the average
    concurrency by Little's law. `serve` returns the speed at a number of concurrent requests.

    Raises:
        ConfigError: the rate is not positive.
    """
    check_positive("the rate", rate)
    if most < 1 or serve(most).requests_per_s < rate:
        return None
    fewer = bisect_left(range(1, most), rate, key=lambda users: serve(users).requests_per_s)
    return serve(fewer + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityPlan:
    """Plan for one KV format of one model on `split.gpus` GPUs; blocks are counted on the fullest GPU."""

    model: str
    gpu: str
    kv: str
    split: Split
    terms: tuple[Term, ...]  # memory terms, with the pool last
    block_bytes: int  # one block of every layer group; in vLLM, whose groups share blocks, one block
    num_blocks: tuple[int, ...]  # per layer group; for vLLM, one number
    step_tokens: int  # maximum number of new tokens per step; a small staging area lowers it
    users: Users
    vllm: Mapping[str, Any] | None = None  # figures that vLLM prints at startup, if vLLM is the engine
    kv_bytes_per_token: float  # on the fullest GPU
    serving: _Serving | None  # with all users that fit; None if only the total size of the weights is known
    state_bytes: int  # of a sequence's recurrent states, on the fullest GPU; in a separate pool
    time: StepTime | None = field(repr=False, compare=False)  # step times
    serve: Callable[[int], _Serving] | None = field(repr=False, compare=False)  # speed at a number of users
    usd_per_million_tokens: float | None  # generated tokens, at full load
    refused: str | None = None  # why kvq's engine does not run the model

    @property
    def pool_bytes(self) -> int:
        """Bytes for KV on the fullest GPU."""
        return self.terms[-1].nbytes

    @property
    def weights_bytes(self) -> int:
        """Bytes of weights on the fullest GPU."""
        return sum(term.nbytes for term in self.terms if "weight" in term.name or "embedding" in term.name)


def make_plan(
    target: Target,
    gpu: Gpu,
    kv: str,
    demand: Demand,
    *,
    engine: Engine | None = None,
    efficiency: Efficiency | None = None,
) -> CapacityPlan:
    """Plan one KV format.

    Raises:
        ConfigError: a request exceeds the model's context, or the model doesn't fit; the message then gives
        the missing bytes and remedies.
    """
    if demand.longest > (most := target.geometry.max_context):
        raise ConfigError(f"a request of {demand.longest:,} tokens is above the model's context of {most:,}")
    engine = engine or Engine()
    if isinstance(engine, VllmEngine):
        target = replace(target, held=replace(target.held, has_packed_experts=True))
    layout = kv_layout(
        split_geometry(target.geometry, target.split),
        kv,
        block_size=engine.block_size,
        whole_blocks=not isinstance(engine, VllmEngine),
    )
    pools = engine.pools(target, gpu, layout, demand)
    time = serve = served = price = None
    if target.parameters is not None:
        time = roofline(target, layout, gpu, efficiency or Efficiency())
        serve = partial(serving, time, demand)
    if serve is not None and pools["users"].paged:
        served = serve(pools["users"].paged)
        price = usd_per_million(gpu.usd_per_hour * target.split.gpus, served.tokens_per_s)
    return CapacityPlan(
        **pools,
        model=target.name,
        gpu=gpu.name,
        kv=kv,
        split=target.split,
        kv_bytes_per_token=layout.kv_bytes_per_token,
        serving=served,
        state_bytes=layout.geometry.state_bytes(int(target.held.other.weight_bytes)),
        time=time,
        serve=serve,
        usd_per_million_tokens=price,
        refused=target.refused,
    )


class _PlanOptions(TypedDict, total=False):
    """Options of `plan` for weights, engine and shared prefixes."""

    weights: str
    weight_bytes: int | None
    split: Split | None
    engine: Engine | None
    prefix_share: float


@checked
def plan(
    model: str | Path,
    *,
    gpu: str | Gpu,
    kv: str = "int4",
    context: int | None = None,
    output: int | None = None,
    lengths: Sequence[Length] | None = None,
    **options: Unpack[_PlanOptions],
) -> CapacityPlan:
    """Plan how many requests of `context` tokens, or with these `lengths`, fit on a GPU.

    `model`: a name in `kvq models`, or a folder with a config.json. `output`: how many tokens of the context
    are generated, by default an eighth. `weights`: the format of the linear layers, by default the format in
    the checkpoint's config; `weight_bytes` replaces the calculated size. `split`: the split over GPUs;
    `engine`: settings that affect memory; `prefix_share`: the share of each prompt that all requests have in
    common.

    Raises:
        ConfigError: a name is unknown, neither or both of `context` and `lengths` are given, or the model
        doesn't fit.
    """
    engine = options.get("engine")
    target = make_target(
        model,
        weights=options.get("weights", AUTO),
        weight_bytes=options.get("weight_bytes"),
        split=options.get("split"),
        max_context=None if engine is None else engine.max_context,
    )
    if (context is None) == (lengths is None):
        raise ConfigError("how long requests are decides how many fit: give either context or lengths")
    drawn = lengths or fixed(context or 0, output or (context or 0) // 8)
    demand = Demand(lengths=drawn, prefix_share=options.get("prefix_share", 0.0))
    found = gpu if isinstance(gpu, Gpu) else find_gpu(gpu)
    return make_plan(target, found, kv, demand, engine=engine)


def users_by_context(target: Target, gpu: Gpu, kv: str, engine: Engine) -> list[tuple[int, int]]:
    """Return (context, number of requests that fit), doubling the context up to the engine's maximum."""
    longest = min(target.geometry.max_context, engine.max_context or target.geometry.max_context)
    return [
        (context, make_plan(target, gpu, kv, Demand(lengths=fixed(context)), engine=engine).users.paged)
        for context in _doubling(_SHORTEST, longest)
    ]


def speed_by_users(plan: CapacityPlan, usd_per_hour: float) -> list[dict[str, Any]]:
    """Return latency and cost at concurrencies that double up to the maximum number of requests that fit."""
    if plan.serve is None or not plan.users.paged:
        return []
    return [
        {
            "users": served.users,
            "tokens_per_s": served.tokens_per_s,
            "itl_ms": 1e3 * served.itl_s,
            "usd_per_million_tokens": usd_per_million(usd_per_hour, served.tokens_per_s),
        }
        for served in map(plan.serve, _doubling(1, plan.users.paged))
    ]


def _doubling(first: int, last: int) -> Iterator[int]:
    while first < last:
        yield first
        first *= 2
    yield last
