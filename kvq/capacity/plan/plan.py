"""Where a GPU's memory goes, and how many users what is left holds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from kvq.capacity.plan.cost import usd_per_million
from kvq.capacity.plan.gpus import Gpu
from kvq.capacity.plan.latent import LatentKV, latent_kv
from kvq.capacity.plan.lengths import Length
from kvq.capacity.plan.roofline import Efficiency, Serving
from kvq.capacity.plan.speed import serving
from kvq.capacity.plan.step_time import StepTime, roofline
from kvq.capacity.plan.users import Users, count_users
from kvq.errors import ConfigError
from kvq.geometry import ModelGeometry
from kvq.layout import KVLayout
from kvq.sizes import decimal
from kvq.sizing.held import HeldAs
from kvq.sizing.memory import (
    ACTIVATION_TERM,
    Split,
    Term,
    activation_term,
    kv_layout,
    on_one_gpu,
    split_geometry,
    weight_terms,
)
from kvq.sizing.parameters import Parameters
from kvq.sizing.pools import (
    GPU_FRACTION,
    MAX_NUM_BATCHED_TOKENS,
    bytes_of,
    pool_budget,
    share_blocks,
    wanted_blocks,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A model as it shall be served."""

    name: str
    geometry: ModelGeometry
    parameters: Parameters | None = None  # None: `weight_bytes` says it
    held: HeldAs = field(default_factory=lambda: HeldAs(linear="fp16"))
    weight_bytes: int | None = None  # of the whole model, instead of counting them
    split: Split = field(default_factory=Split)
    latent_values: int | None = None  # of a token and layer, where attention is latent

    def terms(self) -> tuple[Term, ...]:
        """The weights of the fullest GPU."""
        if self.weight_bytes is not None:
            given = Term(name="weights", nbytes=self.weight_bytes, formula="as given")
            return on_one_gpu((given,), self.geometry, self.split)
        if self.parameters is None:
            raise ConfigError(f"{self.name}: neither parameters nor bytes of the weights are known")
        return on_one_gpu(weight_terms(self.parameters, self.held), self.geometry, self.split)


_ROOMY = 0.9  # of a GPU, below which advice is no trap: something is left for KV
FREE_TERM = "left free"
_FRAGMENTS = 0.01  # of what is free, that is no whole block


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """What of an engine's settings takes memory; as they are, those of `kvq serve` without options."""

    block_size: int = 32  # tokens
    step_tokens: int = MAX_NUM_BATCHED_TOKENS  # most new tokens of a step
    sequences: int | None = None  # most that run side by side; None: as many as fit
    max_context: int | None = None  # of a sequence, by which layer groups share memory; None: the model's
    runtime_bytes: int = 600_000_000  # of the process on the GPU before it holds a tensor; measure yours
    memory_fraction: float = GPU_FRACTION  # of what is free once the weights are loaded

    def __post_init__(self) -> None:
        if not 0 < self.memory_fraction <= 1:
            raise ConfigError(
                f"the memory fraction must be above 0 and at most 1, got {self.memory_fraction}"
            )
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
    lengths: Sequence[Length],
    *,
    slot_tokens: int,
    engine: Engine | None = None,
    prefix_share: float = 0.0,
    efficiency: Efficiency | None = None,
) -> CapacityPlan:
    """Plan one KV format.

    `slot_tokens`: what an engine without blocks would reserve for each request.

    Raises:
        ConfigError: the model doesn't fit, with by how much and what would help.
    """
    engine = engine or Engine()
    own = split_geometry(target.geometry, target.split)
    layout = kv_layout(own, kv, block_size=engine.block_size)
    room = _Room.of(target, gpu, engine)
    block_bytes = sum(group.block_bytes for group in layout.groups)
    num_blocks = _pool_blocks(layout, target, engine, room.pool_bytes)
    if min(num_blocks) < 1:
        raise ConfigError(_does_not_fit(target, gpu, engine, room, block_bytes))
    pool = Term(
        name="KV pool",
        nbytes=bytes_of(layout, num_blocks),
        formula=" + ".join(
            f"{count:,} x {group.block_bytes:,} B ({group.group.name})"
            for count, group in zip(num_blocks, layout.groups, strict=True)
        )
        + f", blocks of {engine.block_size} tokens",
    )
    users = count_users(
        layout,
        num_blocks,
        lengths,
        slot_tokens=slot_tokens,
        step_tokens=engine.step_tokens,
        prefix_share=prefix_share,
        seats=engine.sequences,
    )
    time = serve = None
    if target.parameters is not None:
        time = roofline(
            target.parameters,
            target.geometry,
            layout,
            gpu,
            weight_bytes=sum(term.nbytes for term in target.terms()),
            split=target.split,
            efficiency=efficiency or Efficiency(),
        )
        serve = partial(_serving, time, lengths, prefix_share)
    served = serve(users.paged) if serve is not None and users.paged else None
    price = gpu.usd_per_hour * target.split.gpus
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
        latent=latent_kv(target.latent_values, len(own.layers), kv, pool.nbytes, lengths, engine.block_size),
        time=time,
        serve=serve,
        usd_per_million_tokens=None if served is None else usd_per_million(price, served.tokens_per_s),
    )


def _pool_blocks(layout: KVLayout, target: Target, engine: Engine, budget: int) -> list[int]:
    """Of each layer group, shared out as an engine does for as many sequences, or for more than fit."""
    most = target.geometry.max_context
    longest = min(engine.max_context or most, most)
    one = wanted_blocks(layout, sequences=1, max_context=longest, step_tokens=engine.step_tokens)
    sequences = engine.sequences or max(0, budget) // bytes_of(layout, one) + 1
    return share_blocks(layout, [sequences * count for count in one], budget)


def _serving(time: StepTime, lengths: Sequence[Length], prefix_share: float, users: int) -> Serving:
    return serving(time, lengths, users=users, prefix_share=prefix_share)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Room:
    """All terms but the pool, of the fullest GPU, and what they leave for it."""

    terms: tuple[Term, ...]
    free_bytes: int  # beside the weights
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
            pool_bytes=budget,
            fraction=engine.memory_fraction,
        )

    def left(self, pool: Term) -> tuple[Term, ...]:
        """What the pool does not take."""
        activations = sum(term.nbytes for term in self.terms if term.name == ACTIVATION_TERM)
        rest = self.free_bytes - activations - pool.nbytes
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
