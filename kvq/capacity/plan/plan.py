"""Where a GPU's memory goes, and how many users what is left holds."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from kvq.capacity.plan.cost import check_share, usd_per_million
from kvq.capacity.plan.gpus import Gpu
from kvq.capacity.plan.latent import LatentKV, latent_kv
from kvq.capacity.plan.lengths import Demand
from kvq.capacity.plan.roofline import Efficiency
from kvq.capacity.plan.speed import Serving, serving
from kvq.capacity.plan.step_time import StepTime, roofline
from kvq.capacity.plan.target import Target
from kvq.capacity.plan.users import Users, count_users
from kvq.errors import ConfigError
from kvq.layout import BLOCK_SIZE, KVLayout
from kvq.sizes import decimal
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
