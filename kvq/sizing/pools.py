"""Pool sizes: the division of KV memory among layer groups, for the engine and for the planner."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from kvq.layout import GroupLayout, KVLayout, Role
from kvq.sizing.needs import (
    STATES_EACH,
    bytes_of,
    sequence_alone,
    sequence_blocks,
    sequences_blocks,
    wanted_blocks,
)

RESERVE_FRACTION = 0.01  # of the pool, kept from new requests so that running ones can grow
GPU_FRACTION = 0.9  # of what is free once the weights are loaded; graphs, logits and fragments have the rest
CPU_FRACTION = 0.5
CPU_MOST = 4 << 30  # bytes, by default: other programs need a host's memory too
STEP_MOST = 0.0625  # of the pools' memory, for the tokens of a step, while they are staged
OTHERS_LEAST = 0.125  # of it, for staging groups, where a context that is cut short could take all
_USUAL = 1024  # tokens of a sequence, for which recurrent states are sized
_SHORT = 512  # tokens of a sequence, for which staging areas are sized in pools that are too small for all
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 128, 2048  # of an engine, by default


def pool_budget(  # D270: the memory that CUDA reports, not the data sheet's
    free_bytes: int, *, activation_bytes: int, on_gpu: bool, fraction: float | None = None
) -> int:
    """Return the bytes that pools may take of the memory that is free when the weights are loaded.

    `activation_bytes`: what the largest step needs beside weights and pools. `fraction`: of the free
    bytes, where it is not the device's own; then a host gives as much as that.
    """
    share = fraction or (GPU_FRACTION if on_gpu else CPU_FRACTION)
    budget = int(free_bytes * share) - activation_bytes
    return budget if on_gpu or fraction is not None else min(budget, CPU_MOST)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolPlan:
    """Blocks, step size and concurrency of an engine."""

    num_blocks: list[int]  # per layer group
    step_tokens: int  # most new tokens of a step
    sequences: int  # most that run side by side

    @property
    def chunk(self) -> int:
        """Most new tokens of a step: at least one for each sequence."""
        return max(self.step_tokens, self.sequences)


def plan_pools(  # D269: the planner is the engine's own arithmetic
    layout: KVLayout, budget_bytes: int | None, *, sequences: int, max_context: int, step_tokens: int
) -> PoolPlan:
    """Divide `budget_bytes` for `sequences` sequences of full length; None: all that they could use.

    1. One sequence comes first. It gets the blocks of the longest context that `budget_bytes` hold at all,
       together with the tokens of a step. For staged tokens that may be as short as a block here; and
       a context that is longer than what fits leaves an eighth of the memory to staging groups, for others.
       No blocks at all: less than one of every layer group fits.
    2. A step of a staged recipe takes as many tokens as that leaves room for, a sixteenth of the memory at
       most. No more sequences run side by side than a step has tokens.
    3. All groups of a staged recipe get room for as many sequences of 512 tokens as fit side by side. Where
       all fit, staging groups get room for all with as many tokens as fit.
    4. With recurrent states, sequences of 1,024 tokens get theirs and room for two snapshots, as
       many sequences as fit side by side.
    5. The rest is shared by what groups want, staging groups last: they have what those sequences need. If
       they get all of it, steps grow into what is left.

    More memory never makes the longest context shorter.
    """
    limits = {"sequences": sequences, "max_context": max_context}
    wanted = wanted_blocks(layout, **limits, step_tokens=step_tokens)
    if budget_bytes is None:
        return PoolPlan(num_blocks=wanted, step_tokens=step_tokens, sequences=sequences)
    chunk, is_staged = max(step_tokens, sequences), layout.recipe.is_staged
    first = _First(layout, budget_bytes, min(chunk, layout.block_size) if is_staged else chunk)
    longest = first.longest(max_context)
    if not longest:
        return PoolPlan(num_blocks=[0] * len(wanted), step_tokens=step_tokens, sequences=sequences)
    if not is_staged:
        least = first.blocks(longest)
        least = _with_states(layout, least, budget_bytes, sequences=sequences, max_context=max_context)
        blocks = share_blocks(layout, _at_least(wanted, least), budget_bytes, least)
        return PoolPlan(num_blocks=blocks, step_tokens=step_tokens, sequences=sequences)
    is_bounded = False
    if longest < max_context:
        others = min(OTHERS_LEAST * budget_bytes, bytes_of(layout, _staging(layout, wanted)))
        bounded = first.longest(longest, staging_bytes=others)
        is_bounded, longest = bounded < longest, bounded
    step_tokens = _staged_step(layout, chunk, budget_bytes, longest)
    limits["sequences"] = min(sequences, step_tokens)
    least = sequence_alone(layout, longest, 1, step_tokens=step_tokens)
    least = _with_states(layout, least, budget_bytes, sequences=limits["sequences"], max_context=max_context)
    wanted = _at_least(wanted_blocks(layout, **limits, step_tokens=step_tokens), least)
    if is_bounded:  # all the rest is for others: the context would be longer by what rounding leaves
        blocks = share_blocks(layout, _merged(layout, sealed=least, staging=wanted), budget_bytes, least)
    else:
        fitted = _side_by_side(layout, budget_bytes, least, **limits, step_tokens=step_tokens)
        blocks = share_blocks(layout, _merged(layout, sealed=wanted, staging=fitted), budget_bytes, fitted)
        blocks = share_blocks(layout, wanted, budget_bytes, blocks)
    if blocks == wanted and limits["sequences"] == sequences:  # the unused rest is for longer steps

        def needed(tokens: int) -> list[int]:
            return _at_least(wanted_blocks(layout, **limits, step_tokens=tokens), least)

        steps = range(step_tokens, chunk + 1)
        fits = bisect_left(steps, True, key=lambda tokens: bytes_of(layout, needed(tokens)) > budget_bytes)
        step_tokens = steps[max(0, fits - 1)]
        blocks = needed(step_tokens)
    return PoolPlan(num_blocks=blocks, step_tokens=step_tokens, sequences=limits["sequences"])


def _with_states(
    layout: KVLayout, least: Sequence[int], budget_bytes: int, *, sequences: int, max_context: int
) -> list[int]:
    """`least` with the blocks of recurrent states that are worth having beside it."""
    least = list(least)
    if layout.states is not None:
        states = layout.states.block_bytes * STATES_EACH
        each = layout.sequence_bytes(min(_USUAL, max_context)) - layout.states.block_bytes + states
        count = min(sequences, (budget_bytes - bytes_of(layout, least)) // each)
        least[-1] = max(least[-1], count * STATES_EACH)
    return least


@dataclass(frozen=True, slots=True)
class _First:  # D272: one long sequence first, then many of 512 tokens
    """The sequence that gets memory first."""

    layout: KVLayout
    budget_bytes: int
    step_tokens: int

    def blocks(self, tokens: int) -> list[int]:
        """Return the most blocks that the sequence holds, per layer group."""
        return sequence_alone(self.layout, tokens, 1, step_tokens=self.step_tokens)

    def longest(self, most: int, *, staging_bytes: float = 0) -> int:
        """Return the most tokens that fit if staging groups take `staging_bytes` or what they need; or 0."""

        def is_too_long(tokens: int) -> bool:
            blocks = self.blocks(tokens)
            staging = bytes_of(self.layout, _staging(self.layout, blocks))
            sealed = bytes_of(self.layout, blocks) - staging
            return sealed + max(staging, staging_bytes) > self.budget_bytes

        return bisect_left(range(1, most + 1), True, key=is_too_long)


def _staged_step(layout: KVLayout, step_tokens: int, budget_bytes: int, longest: int) -> int:
    """Return the most tokens of a step, in whole blocks, that a sixteenth of the memory holds.

    They fit beside a sequence of `longest` tokens; a block of tokens does in any case.
    """
    block = sum(group.block_bytes for group in layout.groups if group.role is Role.RECENT)
    size, most = layout.block_size, int(STEP_MOST * budget_bytes / block)

    def is_too_long(blocks: int) -> bool:
        tokens = min(step_tokens, blocks * size)
        return bytes_of(layout, sequence_alone(layout, longest, 1, step_tokens=tokens)) > budget_bytes

    fits = bisect_left(range(1, min(most, -(-step_tokens // size)) + 1), True, key=is_too_long)
    return min(step_tokens, max(1, fits) * size)


def _side_by_side(
    layout: KVLayout,
    budget_bytes: int,
    least: Sequence[int],
    *,
    sequences: int,
    max_context: int,
    step_tokens: int,
) -> list[int]:
    """Return blocks for all sequences of `_SHORT` tokens that fit; staging groups for longer ones."""

    def blocks(count: int, tokens: int) -> list[int]:
        return _at_least(sequences_blocks(layout, tokens, 1, count=count, step_tokens=step_tokens), least)

    def is_too_many(count: int) -> bool:
        return bytes_of(layout, blocks(count, short)) > budget_bytes

    def is_too_long(tokens: int) -> bool:
        return bytes_of(layout, blocks(sequences, tokens)) > budget_bytes

    short = min(max_context, _SHORT)
    count = bisect_left(range(1, sequences + 1), True, key=is_too_many)
    if not count:
        return list(least)
    longer = short
    if count == sequences:
        longer += bisect_left(range(short + 1, max_context + 1), True, key=is_too_long)
    return _merged(layout, sealed=blocks(count, short), staging=blocks(count, longer))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Crowd:
    """Number of equal sequences that run at once."""

    count: int
    limit: GroupLayout | None  # the layer group whose blocks run out first; None: as many as may run at all


def at_once(layout: KVLayout, pools: PoolPlan, tokens: int) -> _Crowd:
    """Return how many sequences of `tokens` tokens fit into pools, each with its most blocks; maybe 0."""
    own = sequence_blocks(layout, tokens, 1, step_tokens=pools.chunk)
    alone = sequence_alone(layout, tokens, 1, step_tokens=pools.chunk)
    fits = [
        max(0, (count - most) // each + 1)
        for count, each, most in zip(pools.num_blocks, own, alone, strict=True)
    ]
    if min(fits) >= pools.sequences:
        return _Crowd(count=pools.sequences, limit=None)
    return _Crowd(count=min(fits), limit=layout.groups[fits.index(min(fits))])


def longest_context(layout: KVLayout, pools: PoolPlan, max_context: int) -> int:
    """Return the tokens of the longest sequence that is not refused, at most `max_context`."""
    return bisect_left(
        range(1, max_context + 1), True, key=lambda tokens: at_once(layout, pools, tokens).count < 1
    )


def share_blocks(
    layout: KVLayout, wanted: Sequence[int], budget_bytes: float, least: Sequence[int] | None = None
) -> list[int]:
    """Return one share of what each layer group wants, such that `budget_bytes` hold all blocks.

    No group gets less than its `least`, for which there is room in any case.
    """
    least = [0] * len(wanted) if least is None else least
    budget, free, share = max(0, budget_bytes), set(range(len(wanted))), 1.0
    while free:
        taken = bytes_of(layout, [0 if i in free else count for i, count in enumerate(least)])
        total = bytes_of(layout, [count if i in free else 0 for i, count in enumerate(wanted)])
        share = min(1.0, (budget - taken) / max(1, total))
        below = {i for i in free if wanted[i] * share < least[i]}
        if not below:
            break
        free -= below
    return [math.floor(wanted[i] * share) if i in free else count for i, count in enumerate(least)]


def _at_least(blocks: Sequence[int], least: Sequence[int]) -> list[int]:
    return [max(own, other) for own, other in zip(blocks, least, strict=True)]


def _staging(layout: KVLayout, blocks: Sequence[int]) -> list[int]:
    """Return the blocks of staging groups, and 0 for the others."""
    return _merged(layout, sealed=[0] * len(blocks), staging=blocks)


def _merged(layout: KVLayout, *, sealed: Sequence[int], staging: Sequence[int]) -> list[int]:
    """Return the blocks of each group from the list for its kind."""
    pairs = zip(layout.groups, sealed, staging, strict=True)
    return [other if group.is_staging else own for group, own, other in pairs]


def reserve_blocks(num_blocks: Sequence[int], fraction: float = RESERVE_FRACTION) -> int:
    """Return the blocks of every pool that are kept from new requests."""
    return min(int(fraction * min(num_blocks)), min(num_blocks) - 1)
