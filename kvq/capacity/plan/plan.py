"""Where a GPU's memory goes, and how many users what is left holds; `kvq.plan` says it in one call.

Beside it what it would be for other lengths and other numbers of users, for plots.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

from kvq.arguments import checked
from kvq.capacity.lengths import Demand, Length, fixed
from kvq.capacity.plan.cost import check_share, usd_per_million
from kvq.capacity.plan.gpus import Gpu, find_gpu
from kvq.capacity.plan.speed import Serving, serving
from kvq.capacity.plan.step_time import Efficiency, StepTime, roofline
from kvq.capacity.plan.target import Target, make_target
from kvq.capacity.plan.users import LatentKV, Users, count_users, latent_kv
from kvq.errors import ConfigError
from kvq.layout import BLOCK_SIZE, KVLayout
from kvq.sizes import decimal
from kvq.sizing.held import AUTO
from kvq.sizing.memory import Split, Term, activation_term, kv_layout, split_geometry
from kvq.sizing.pools import (
    GPU_FRACTION,
    MAX_NUM_BATCHED_TOKENS,
    bytes_of,
    pool_budget,
    share_blocks,
    wanted_blocks,
)

_ROOMY = 0.9  # of a GPU, below which advice is no trap: something is left for KV
FREE_TERM = "left free"
_FRAGMENTS = 0.01  # of what is free, that is no whole block
_SHORTEST = 1024  # tokens, of plots


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """What of an engine's settings takes memory; as they are, those of `kvq serve` without options."""

    block_size: int = BLOCK_SIZE  # tokens
    step_tokens: int = MAX_NUM_BATCHED_TOKENS  # most new tokens of a step
    sequences: int | None = None  # most that run side by side; None: as many as fit
    max_context: int | None = None  # of a sequence, by which layer groups share memory; None: the model's
    runtime_bytes: int = 600_000_000  # of the process on the GPU before it holds a tensor; measure yours
    memory_fraction: float = GPU_FRACTION  # of what is free once the weights are loaded

    def __post_init__(self) -> None:
        check_share("the memory fraction", self.memory_fraction)
        if self.runtime_bytes < 0:
            raise ConfigError(f"the runtime's bytes must be at least 0, got {self.runtime_bytes}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityPlan:
    """One KV format of one model on one kind of GPU, `split.gpus` of them."""

    model: str
    gpu: str
    kv: str
    split: Split
    terms: tuple[Term, ...]  # of the fullest GPU, the pool last
    kv_bytes_per_token: float  # on it
    block_bytes: int  # of one block of every layer group
    num_blocks: tuple[int, ...]  # of each layer group
    users: Users
    serving: Serving | None  # at as many users as fit; None where the weights are not known one by one
    latent: LatentKV | None  # the same in latent vectors, which kvq's engine does not keep
    time: StepTime | None = field(repr=False, compare=False)  # of its steps
    serve: Callable[[int], Serving] | None = field(repr=False, compare=False)  # what so many users see
    usd_per_million_tokens: float | None  # generated ones, at full load

    @property
    def pool_bytes(self) -> int:
        """For KV, on the fullest GPU."""
        return self.terms[-1].nbytes

    @property
    def weights_bytes(self) -> int:
        """On the fullest GPU."""
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
        ConfigError: a request beyond the model's context; a model that doesn't fit, with by how much and
            what would help.
    """
    if demand.longest > (most := target.geometry.max_context):
        raise ConfigError(f"a request of {demand.longest:,} tokens is above the model's context of {most:,}")
    engine = engine or Engine()
    layout = kv_layout(split_geometry(target.geometry, target.split), kv, block_size=engine.block_size)
    room = _Room.of(target, gpu, engine)
    block_bytes = sum(group.block_bytes for group in layout.groups)
    num_blocks = _pool_blocks(layout, target, engine, room.pool_bytes)
    if min(num_blocks) < 1:
        raise ConfigError(_does_not_fit(target, gpu, engine, room, block_bytes))
    pool = _pool_term(layout, num_blocks)
    users = count_users(layout, num_blocks, demand, step_tokens=engine.step_tokens, seats=engine.sequences)
    time = serve = served = price = None
    if target.parameters is not None:
        time = roofline(target, layout, gpu, efficiency or Efficiency())
        serve = partial(serving, time, demand)
    if serve is not None and users.paged:
        served = serve(users.paged)
        price = usd_per_million(gpu.usd_per_hour * target.split.gpus, served.tokens_per_s)
    return CapacityPlan(
        model=target.name,
        gpu=gpu.name,
        kv=kv,
        split=target.split,
        terms=(*room.terms, *room.left(pool), pool),
        kv_bytes_per_token=layout.kv_bytes_per_token,
        block_bytes=block_bytes,
        num_blocks=tuple(num_blocks),
        users=users,
        serving=served,
        latent=latent_kv(target.latent_values, layout, kv, pool.nbytes, demand),
        time=time,
        serve=serve,
        usd_per_million_tokens=price,
    )


def _pool_blocks(layout: KVLayout, target: Target, engine: Engine, budget: int) -> list[int]:
    """Of each layer group, shared out as an engine does for as many sequences, or for more than fit."""
    most = target.geometry.max_context
    longest = min(engine.max_context or most, most)
    one = wanted_blocks(layout, sequences=1, max_context=longest, step_tokens=engine.step_tokens)
    sequences = engine.sequences or max(0, budget) // bytes_of(layout, one) + 1
    return share_blocks(layout, [sequences * count for count in one], budget)


def _pool_term(layout: KVLayout, num_blocks: list[int]) -> Term:
    parts = [
        f"{count:,} x {group.block_bytes:,} B ({group.group.name})"
        for count, group in zip(num_blocks, layout.groups, strict=True)
    ]
    formula = f"{' + '.join(parts)}, blocks of {layout.block_size} tokens"
    return Term(name="KV pool", nbytes=bytes_of(layout, num_blocks), formula=formula)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Room:
    """All terms but the pool, of the fullest GPU, and what they leave for it."""

    terms: tuple[Term, ...]
    free_bytes: int  # beside the weights
    activation_bytes: int  # that a step takes of these
    pool_bytes: int  # at most; below 0: so much is missing
    fraction: float

    @classmethod
    def of(cls, target: Target, gpu: Gpu, engine: Engine) -> "_Room":
        """As an engine finds it: its share of what is free beside the weights, less what a step needs."""
        runtime = Term(
            name="runtime", nbytes=engine.runtime_bytes, formula="CUDA context, kernels, libraries"
        )
        weights = target.terms()
        activations = activation_term(
            target.geometry, target.parameters, step_tokens=engine.step_tokens, split=target.split
        )
        free = gpu.memory_bytes - runtime.nbytes - sum(term.nbytes for term in weights)
        budget = pool_budget(
            free, activation_bytes=activations.nbytes, on_gpu=True, fraction=engine.memory_fraction
        )
        return cls(
            terms=tuple(t for t in (*weights, activations, runtime) if t.nbytes),
            free_bytes=free,
            activation_bytes=activations.nbytes,
            pool_bytes=budget,
            fraction=engine.memory_fraction,
        )

    def left(self, pool: Term) -> tuple[Term, ...]:
        """What the pool does not take."""
        rest = self.free_bytes - self.activation_bytes - pool.nbytes
        formula = f"{1 - self.fraction:.3g} of {self.free_bytes:,} B: graphs, logits, fragments"
        if self.pool_bytes > pool.nbytes + _FRAGMENTS * self.free_bytes:
            formula += "; and what so many sequences can't use"
        return (Term(name=FREE_TERM, nbytes=rest, formula=formula),) if rest > 0 else ()


def _does_not_fit(target: Target, gpu: Gpu, engine: Engine, room: _Room, block_bytes: int) -> str:
    taken = sum(term.nbytes for term in room.terms)
    more = max(block_bytes, taken - gpu.memory_bytes, block_bytes - room.pool_bytes)
    ways = ["take narrower weights (--weights int4)", "or a larger GPU"]
    for ranks in (2, 4, 8, 16, 32, 64):
        spread = replace(target, split=replace(target.split, tensor=ranks * target.split.tensor))
        if target.geometry.q_heads % spread.split.tensor:
            break
        if _Room.of(spread, gpu, engine).pool_bytes > (1 - _ROOMY) * gpu.memory_bytes:
            option = f"--tensor-parallel {spread.split.tensor}"
            ways.insert(0, f"spread it over {spread.split.gpus} GPUs ({option})")
            break
    return (
        f"{target.name} does not fit on {target.split.gpus} x {gpu.name}: weights, activations and runtime "
        f"take {decimal(taken)} of each GPU's {decimal(gpu.memory_bytes)}, {decimal(more)} too much; "
        f"{', '.join(ways)}"
    )


class PlanKeywords(TypedDict, total=False):
    """What `plan` takes of the model's weights, of the engine and of what requests share."""

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
    **options: Unpack[PlanKeywords],
) -> CapacityPlan:
    """How many requests of `context` tokens, or of these `lengths`, fit on a GPU.

    `model`: a name of `kvq models`, or a folder with a config.json. `output`: of the context, an eighth
    unless said. `weights`: the format of the linear layers, by default what the config says of
    the checkpoint's; `weight_bytes` replaces the count. `split`: over how many GPUs it is spread; `engine`:
    settings that take memory; `prefix_share`: of the prompts, what all requests have in common.

    Raises:
        ConfigError: something unknown, no lengths, or the model doesn't fit, with by how much.
    """
    target = make_target(
        model,
        weights=options.get("weights", AUTO),
        weight_bytes=options.get("weight_bytes"),
        split=options.get("split"),
    )
    if (context is None) == (lengths is None):
        raise ConfigError("how long requests are decides how many fit: give either context or lengths")
    drawn = lengths or fixed(context or 0, output or (context or 0) // 8)
    demand = Demand(lengths=drawn, prefix_share=options.get("prefix_share", 0.0))
    found = gpu if isinstance(gpu, Gpu) else find_gpu(gpu)
    return make_plan(target, found, kv, demand, engine=options.get("engine"))


def users_by_context(target: Target, gpu: Gpu, kv: str, engine: Engine) -> list[tuple[int, int]]:
    """(context, requests that fit at once), the context doubling up to the longest that the engine takes."""
    longest = min(target.geometry.max_context, engine.max_context or target.geometry.max_context)
    found = []
    for context in _doubling(_SHORTEST, longest):
        made = make_plan(target, gpu, kv, Demand(lengths=fixed(context)), engine=engine)
        found.append((context, made.users.paged))
    return found


def speed_by_users(plan: CapacityPlan, usd_per_hour: float) -> list[dict[str, Any]]:
    """Latency and cost as more requests run side by side, doubling up to as many as fit."""
    if plan.serve is None or not plan.users.paged:
        return []
    points = []
    for users in _doubling(1, plan.users.paged):
        served = plan.serve(users)
        points.append(
            {
                "users": users,
                "tokens_per_s": served.tokens_per_s,
                "itl_ms": 1e3 * served.itl_s,
                "usd_per_million_tokens": usd_per_million(usd_per_hour, served.tokens_per_s),
            }
        )
    return points


def _doubling(first: int, last: int) -> Iterator[int]:
    while first < last:
        yield first
        first *= 2
    yield last
