"""Engine in a capacity plan: GPU memory for weights, activations and runtime, and kvq's pools in the rest."""

import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from kvq.capacity.lengths import Demand
from kvq.capacity.plan.gpus import Gpu, check_share
from kvq.capacity.plan.target import Target
from kvq.errors import ConfigError
from kvq.layout import BLOCK_SIZE, KVLayout
from kvq.sizes import decimal
from kvq.sizing.memory import Term, activation_term
from kvq.sizing.needs import bytes_of, sequence_alone, sequence_blocks, wanted_blocks
from kvq.sizing.pools import GPU_FRACTION, MAX_NUM_BATCHED_TOKENS, PoolPlan, plan_pools, pool_budget

_FRAGMENTS = 0.01  # share of free memory that may be left over as fractions of blocks
_ROOMY = 0.9  # maximum share of a GPU used by a suggested split; the rest is for KV
# D274: for hybrid models, the maximum number of sequences that fit
_MOST_SEQUENCES = 1 << 20  # maximum number of sequences for which a staging area is planned


@dataclass(frozen=True, kw_only=True, slots=True)
class Users:
    """Number of requests that fit at once, each counted with its KV at full length."""

    paged: int  # in blocks
    contiguous: int  # in reserved slots of equal length, in the same format
    bytes_per_request: float  # mean size of a request's blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class _Room:
    """Memory terms of the fullest GPU except the pool, and the memory left for the pool."""

    terms: tuple[Term, ...]
    free_bytes: int  # memory left by weights and runtime
    activation_bytes: int  # part of the free memory that a step takes
    pool_bytes: int  # maximum size of the pool; negative if memory is missing

    def with_pool(self, pool: Term, why_free: str) -> tuple[Term, ...]:
        """Return all memory terms, including the memory left free and the pool."""
        rest = self.free_bytes - self.activation_bytes - pool.nbytes
        left = (Term(name="left free", nbytes=rest, formula=why_free),) if rest > 0 else ()
        return (*self.terms, *left, pool)


def does_not_fit(target: Target, gpu: Gpu, engine: "Engine", room: _Room, block_bytes: int) -> str:
    """Return the error message for a model that does not fit, with the missing bytes and remedies."""
    taken = sum(term.nbytes for term in room.terms)
    more = max(block_bytes, taken - gpu.memory_bytes, block_bytes - room.pool_bytes)
    ways = ["take narrower weights (--weights int4)", "or a larger GPU"]
    for ranks in (2, 4, 8, 16, 32, 64):
        spread = replace(target, split=replace(target.split, tensor=ranks * target.split.tensor))
        if target.geometry.q_heads % spread.split.tensor:
            break
        if engine.room(spread, gpu).pool_bytes > (1 - _ROOMY) * gpu.memory_bytes:
            option = f"--tensor-parallel {spread.split.tensor}"
            ways.insert(0, f"spread it over {spread.split.gpus} GPUs ({option})")
            break
    return (
        f"{target.name} does not fit on {target.split.gpus} x {gpu.name}: weights, activations and runtime "
        f"take {decimal(taken)} of each GPU's {decimal(gpu.memory_bytes)}, {decimal(more)} too much; "
        f"{', '.join(ways)}"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:  # D277: the memory for blocks is separate from the kind of blocks
    """Settings of kvq's engine that affect memory use, with the defaults of `kvq serve`."""

    block_size: int = BLOCK_SIZE  # tokens
    step_tokens: int = MAX_NUM_BATCHED_TOKENS  # maximum new tokens per step
    memory_fraction: float = GPU_FRACTION  # of the memory that is free after loading the weights
    sequences: int | None = None  # maximum number of concurrent sequences; None: as many as fit
    max_context: int | None = None  # determines how layer groups share memory; None: the model's maximum
    runtime_bytes: int = 600_000_000  # memory of the process without tensors; measure your own

    def __post_init__(self) -> None:
        check_share("the memory fraction", self.memory_fraction)
        if self.runtime_bytes < 0:
            raise ConfigError(f"the runtime's bytes must be at least 0, got {self.runtime_bytes}")

    def budget(self, total_bytes: int, *, taken_bytes: int, activation_bytes: int) -> int:
        """Return the bytes for pools: a share of the memory left by weights and runtime, minus activations.

        `taken_bytes`: bytes of weights and runtime. The result is negative if memory is insufficient.
        """
        free = total_bytes - taken_bytes
        return pool_budget(
            free, activation_bytes=activation_bytes, on_gpu=True, fraction=self.memory_fraction
        )

    def room(self, target: Target, gpu: Gpu) -> _Room:
        """Return the memory available to the engine after loading the weights."""
        runtime = Term(name="runtime", nbytes=self.runtime_bytes, formula="CUDA context, kernels, libraries")
        weights = target.terms()
        activations = activation_term(
            target.geometry, target.parameters, step_tokens=self.step_tokens, split=target.split
        )
        taken = runtime.nbytes + sum(term.nbytes for term in weights)
        return _Room(
            terms=tuple(t for t in (*weights, activations, runtime) if t.nbytes),
            free_bytes=gpu.memory_bytes - taken,
            activation_bytes=activations.nbytes,
            pool_bytes=self.budget(gpu.memory_bytes, taken_bytes=taken, activation_bytes=activations.nbytes),
        )

    def pools(self, target: Target, gpu: Gpu, layout: KVLayout, demand: Demand) -> dict[str, Any]:
        """Plan one pool per layer group; return fields of `CapacityPlan`.

        Raises:
            ConfigError: the model doesn't fit.
        """
        room = self.room(target, gpu)
        block_bytes = sum(group.block_bytes for group in layout.groups)
        shared = self._shared(layout, target, room.pool_bytes, demand)
        if min(shared.num_blocks) < 1:
            raise ConfigError(does_not_fit(target, gpu, self, room, block_bytes))
        pool = _pool_term(layout, shared.num_blocks)
        why_free = f"{1 - self.memory_fraction:.3g} of {room.free_bytes:,} B: graphs, logits, fragments"
        if room.pool_bytes > pool.nbytes + _FRAGMENTS * room.free_bytes:
            why_free += "; and what so many sequences can't use"
        return {
            "terms": room.with_pool(pool, why_free),
            "block_bytes": block_bytes,
            "num_blocks": tuple(shared.num_blocks),
            "step_tokens": shared.step_tokens,
            "users": _users(layout, shared, demand, self.sequences),
        }

    def _shared(self, layout: KVLayout, target: Target, budget: int, demand: Demand) -> PoolPlan:
        """Divide the budget among layer groups, as an engine for `sequences` sequences does.

        Staging areas and recurrent states take memory for every concurrent sequence; if there are any,
        `sequences` defaults to the maximum number that fits.
        """
        most = target.geometry.max_context
        longest = min(self.max_context or most, most)
        limits = {"max_context": longest, "step_tokens": self.step_tokens}

        def shared(sequences: int) -> PoolPlan:
            return plan_pools(layout, budget, sequences=sequences, **limits)

        def is_too_many(sequences: int) -> bool:
            return _users(layout, shared(sequences), demand, sequences).paged < sequences

        if self.sequences is None and (layout.recipe.is_staged or layout.states is not None):
            too_many = bisect_left(range(1, _MOST_SEQUENCES), True, key=is_too_many)
            return shared(max(1, too_many))
        one = bytes_of(layout, wanted_blocks(layout, sequences=1, **limits))
        return shared(self.sequences or max(0, budget) // one + 1)


def _users(layout: KVLayout, shared: PoolPlan, demand: Demand, sequences: int | None) -> Users:
    most = None if sequences is None else min(sequences, shared.sequences)
    return count_users(layout, shared.num_blocks, demand, step_tokens=shared.step_tokens, most=most)


def _pool_term(layout: KVLayout, num_blocks: list[int]) -> Term:
    parts = [
        f"{count:,} x {group.block_bytes:,} B ({group.name})"
        for count, group in zip(num_blocks, layout.groups, strict=True)
    ]
    formula = f"{' + '.join(parts)}, blocks of {layout.block_size} tokens"
    return Term(name="KV pool", nbytes=bytes_of(layout, num_blocks), formula=formula)


def count_users(
    layout: KVLayout, num_blocks: Sequence[int], demand: Demand, *, step_tokens: int, most: int | None = None
) -> Users:
    """Count the requests that fit in the pools, with blocks and with reserved slots.

    A prefix that all requests have in common is stored once in the blocks of layer groups without sliding
    windows or token limits. `most`: maximum number of concurrent sequences in the engine.
    """
    lengths = demand.lengths
    held, alone = (
        [blocks_of(layout, x.prompt, x.output, step_tokens=step_tokens) for x in lengths]
        for blocks_of in (sequence_blocks, sequence_alone)
    )
    shared = [int(x.prompt * demand.prefix_share) // layout.block_size for x in lengths]
    fits = []
    for group, (count, layer) in enumerate(zip(num_blocks, layout.groups, strict=True)):
        common = 0 if layer.group.window is not None or layer.limit is not None else max(shared)
        each, last = (
            fmean([blocks[group] - (common and own) for blocks, own in zip(kind, shared, strict=True)])
            for kind in (held, alone)
        )
        fits.append(int((count - common - last + each) / each) if each else 0)
    slot = layout.kv_bytes_per_token * demand.slot + (
        0 if layout.states is None else layout.states.block_bytes
    )
    most = sys.maxsize if most is None else most
    return Users(
        paged=min(most, max(0, min(fits))),
        contiguous=min(most, int(bytes_of(layout, num_blocks) / slot)),
        bytes_per_request=fmean([bytes_of(layout, blocks) for blocks in held]),
    )
