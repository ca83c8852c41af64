"""GPU memory used by weights, activations and runtime, and the memory left for an engine's blocks."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from kvq.capacity.plan.gpus import Gpu, check_share
from kvq.capacity.plan.target import Target
from kvq.errors import ConfigError
from kvq.sizes import decimal
from kvq.sizing.memory import Term, activation_term

FREE_TERM = "left free"
FRAGMENTS = 0.01  # of what is free, that is no whole block
_ROOMY = 0.9  # of a GPU, below which advice is no trap: something is left for KV


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings(ABC):
    """Settings of an engine that take memory."""

    block_size: int  # tokens
    step_tokens: int  # most new tokens of a step
    memory_fraction: float  # the engine says of what
    sequences: int | None = None  # most that run side by side; None: as many as fit
    max_context: int | None = None  # of a sequence, by which layer groups share memory; None: the model's
    runtime_bytes: int = 600_000_000  # of the process before it holds a tensor; measure yours

    def __post_init__(self) -> None:
        check_share("the memory fraction", self.memory_fraction)
        if self.runtime_bytes < 0:
            raise ConfigError(f"the runtime's bytes must be at least 0, got {self.runtime_bytes}")

    @abstractmethod
    def budget(self, total_bytes: int, *, taken_bytes: int, activation_bytes: int) -> int:
        """Return the bytes for blocks beside `taken_bytes` of weights and runtime; negative if missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmCache:
    """KV cache figures that vLLM prints when it starts."""

    num_gpu_blocks: int
    max_model_len: int  # tokens
    max_concurrency: float  # requests of that length

    @property
    def tokens(self) -> int:
        """vLLM's "GPU KV cache size"."""
        return int(self.max_concurrency * self.max_model_len)


@dataclass(frozen=True, kw_only=True, slots=True)
class Users:
    """Requests that hold KV at once, each with as much as at its end."""

    paged: int  # in blocks
    contiguous: int  # a slot of one length reserved for each, in the same format
    bytes_per_request: float  # of blocks, on average


@dataclass(frozen=True, kw_only=True, slots=True)
class Pools:
    """Blocks of an engine on the fullest GPU, and all other memory terms."""

    terms: tuple[Term, ...]  # the pool last
    block_bytes: int  # of one block of every layer group; of vLLM's, which share blocks, of one of any
    num_blocks: tuple[int, ...]  # of each layer group; of vLLM's one number
    step_tokens: int  # most new tokens of a step, fewer than configured if they fill a small staging area
    users: Users
    vllm: VllmCache | None = None  # what vLLM says of its blocks, where it is the engine


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """Memory terms of the fullest GPU without the pool, and the memory left for the pool."""

    terms: tuple[Term, ...]
    total_bytes: int
    free_bytes: int  # beside weights and runtime
    activation_bytes: int  # that a step takes of these
    pool_bytes: int  # at most; negative if missing

    @classmethod
    def of(cls, target: Target, gpu: Gpu, engine: EngineSettings) -> "Room":
        """Return the memory as an engine finds it once the weights are loaded."""
        runtime = Term(
            name="runtime", nbytes=engine.runtime_bytes, formula="CUDA context, kernels, libraries"
        )
        weights = target.terms()
        activations = activation_term(
            target.geometry, target.parameters, step_tokens=engine.step_tokens, split=target.split
        )
        taken = runtime.nbytes + sum(term.nbytes for term in weights)
        return cls(
            terms=tuple(t for t in (*weights, activations, runtime) if t.nbytes),
            total_bytes=gpu.memory_bytes,
            free_bytes=gpu.memory_bytes - taken,
            activation_bytes=activations.nbytes,
            pool_bytes=engine.budget(
                gpu.memory_bytes, taken_bytes=taken, activation_bytes=activations.nbytes
            ),
        )

    def with_pool(self, pool: Term, why_free: str) -> tuple[Term, ...]:
        """Return all terms: these, the memory that stays free, and the pool."""
        rest = self.free_bytes - self.activation_bytes - pool.nbytes
        left = (Term(name=FREE_TERM, nbytes=rest, formula=why_free),) if rest > 0 else ()
        return (*self.terms, *left, pool)


def does_not_fit(target: Target, gpu: Gpu, engine: EngineSettings, room: Room, block_bytes: int) -> str:
    """Return the message of a model that does not fit: by how much, and what would help."""
    taken = sum(term.nbytes for term in room.terms)
    more = max(block_bytes, taken - gpu.memory_bytes, block_bytes - room.pool_bytes)
    ways = ["take narrower weights (--weights int4)", "or a larger GPU"]
    for ranks in (2, 4, 8, 16, 32, 64):
        spread = replace(target, split=replace(target.split, tensor=ranks * target.split.tensor))
        if target.geometry.q_heads % spread.split.tensor:
            break
        if Room.of(spread, gpu, engine).pool_bytes > (1 - _ROOMY) * gpu.memory_bytes:
            option = f"--tensor-parallel {spread.split.tensor}"
            ways.insert(0, f"spread it over {spread.split.gpus} GPUs ({option})")
            break
    return (
        f"{target.name} does not fit on {target.split.gpus} x {gpu.name}: weights, activations and runtime "
        f"take {decimal(taken)} of each GPU's {decimal(gpu.memory_bytes)}, {decimal(more)} too much; "
        f"{', '.join(ways)}"
    )
