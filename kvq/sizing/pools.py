"""How the memory for KV is shared out among the layer groups, for the engine and for the planner."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvq.layout import GroupLayout, KVLayout, Role
from kvq.scheduler import most_blocks

RESERVE_FRACTION = 0.01  # of the pool, kept from new requests so that running ones can grow
GPU_FRACTION = 0.9  # of what is free once the weights are loaded; graphs, logits and fragments have the rest
CPU_FRACTION = 0.5
CPU_MOST = 4 << 30  # bytes, unless somebody asks for more: others need a host's memory too
STAGING_MOST = 0.5  # of the pools' memory, for all staging groups together
STEPS_MOST = 0.125  # of the pools' memory, for the tokens of steps, while they are staged
_SHORT = 1024  # tokens of a sequence, for which staging areas are sized in pools that are too small for all
_STEPS = 2  # whose tokens are staged at once: one in flight beside the one that is planned
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 128, 2048  # of an engine that is told nothing else


def pool_budget(
    free_bytes: int, *, activation_bytes: int, on_gpu: bool, fraction: float | None = None
) -> int:
    """What the pools may take, of what is free when the weights are loaded.

    `activation_bytes`: what the largest step needs beside weights and pools. `fraction`: of the free
    bytes, where it is not the device's own; then a host gives as much as that.
    """
    share = fraction or (GPU_FRACTION if on_gpu else CPU_FRACTION)
    budget = int(free_bytes * share) - activation_bytes
    return budget if on_gpu or fraction is not None else min(budget, CPU_MOST)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolPlan:
    """What an engine is sized for."""

    num_blocks: list[int]  # per layer group
    step_tokens: int  # most new tokens of a step


def plan_pools(
    layout: KVLayout, budget_bytes: int | None, *, sequences: int, max_context: int, step_tokens: int
) -> PoolPlan:
    """Share out `budget_bytes` for so many sequences of full length; None: all that they could use.

    Where tokens are staged, a step takes fewer than `step_tokens` if its blocks would be more than an eighth
    of the memory, but a token of each sequence; and room to stage is for as many sequences as fit with 1,024
    tokens each, since more would wait for other blocks.
    """
    seats = sequences
    if budget_bytes is not None and layout.recipe.is_staged:
        step_tokens = max(_staged_step(layout, step_tokens, budget_bytes), sequences)
        one = sequence_blocks(layout, min(max_context, _SHORT), 1, step_tokens=step_tokens)
        rest = budget_bytes - bytes_of(layout, step_blocks(layout, step_tokens))
        seats = min(sequences, max(1, rest // bytes_of(layout, one)))
    blocks = wanted_blocks(
        layout, sequences=sequences, max_context=max_context, step_tokens=step_tokens, seats=seats
    )
    if budget_bytes is not None:
        blocks = share_blocks(layout, blocks, budget_bytes)
    return PoolPlan(num_blocks=blocks, step_tokens=step_tokens)


def _staged_step(layout: KVLayout, step_tokens: int, budget_bytes: int) -> int:
    """The most tokens of a step, of whole blocks, whose staged blocks are an eighth of the memory."""
    block = sum(group.block_bytes for group in layout.groups if group.role is Role.RECENT)
    blocks = int(STEPS_MOST * max(0, budget_bytes) / (_STEPS * block))
    return min(step_tokens, max(1, blocks) * layout.block_size)


def wanted_blocks(
    layout: KVLayout, *, sequences: int, max_context: int, step_tokens: int, seats: int | None = None
) -> list[int]:
    """The most blocks per layer group that so many sequences of full length could use.

    `seats`: for how many of them tokens are staged, by default for all.
    """
    size = layout.block_size
    blocks = []
    for group, shared in zip(layout.groups, step_blocks(layout, step_tokens), strict=True):
        tokens, window = min(max_context, group.limit or max_context), group.group.window
        if window is not None:
            tokens = min(tokens, window + size + (0 if shared else step_tokens))
        count = seats if seats is not None and _is_staging(group) else sequences
        blocks.append(count * -(-tokens // size) + shared)
    return blocks


def step_blocks(layout: KVLayout, step_tokens: int) -> list[int]:
    """Blocks per layer group for the tokens of steps, where they are not counted with each sequence.

    Where recent tokens are staged: for all sequences together, which share them. 0 in other groups.
    """
    blocks = _STEPS * -(-step_tokens // layout.block_size)
    return [blocks if group.role is Role.RECENT else 0 for group in layout.groups]


def sequence_blocks(layout: KVLayout, prompt: int, output: int, *, step_tokens: int) -> list[int]:
    """Blocks per layer group that a sequence holds at most, `step_tokens` being a step's most.

    Beside those of `step_blocks`, where there are any.
    """
    blocks = []
    for group, shared in zip(layout.groups, step_blocks(layout, step_tokens), strict=True):
        reach, chunk = (group.group.window, group.limit), 0 if shared else step_tokens
        blocks += most_blocks(prompt, output, [reach], layout.block_size, chunk)
    return blocks


def bytes_of(layout: KVLayout, blocks: Sequence[int]) -> int:
    """Of so many blocks per layer group."""
    return sum(count * group.block_bytes for count, group in zip(blocks, layout.groups, strict=True))


def share_blocks(layout: KVLayout, wanted: Sequence[int], budget_bytes: int) -> list[int]:
    """Of the blocks that could ever be used as many as `budget_bytes` hold.

    Staging groups come first, since nothing runs without them: all they want, or the same share of each, so
    that they take half of the memory. The others then get the same share of each.
    """
    staged = [count if _is_staging(group) else 0 for count, group in zip(wanted, layout.groups, strict=True)]
    sealed = [count - own for count, own in zip(wanted, staged, strict=True)]
    budget = max(0, budget_bytes)
    staged = _scaled(layout, staged, STAGING_MOST * budget)
    sealed = _scaled(layout, sealed, budget - bytes_of(layout, staged))
    return [own + other for own, other in zip(staged, sealed, strict=True)]


def _is_staging(group: GroupLayout) -> bool:
    return group.role is not Role.SEALED


def _scaled(layout: KVLayout, wanted: Sequence[int], budget_bytes: float) -> list[int]:
    """The same share of each group's blocks, so that `budget_bytes` hold them."""
    share = min(1.0, budget_bytes / max(1, bytes_of(layout, wanted)))
    return [math.floor(count * share) for count in wanted]


def reserve_blocks(num_blocks: Sequence[int], fraction: float = RESERVE_FRACTION) -> int:
    """Blocks of every pool that are kept from new requests."""
    return min(int(fraction * min(num_blocks)), min(num_blocks) - 1)
