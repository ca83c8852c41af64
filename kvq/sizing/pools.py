"""Pool sizes: how KV memory is divided among layer groups, for the engine and for the planner."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvq.errors import ConfigError
from kvq.layout import GroupLayout, KVLayout, Role
from kvq.sizing import needs
from kvq.sizing.needs import bytes_of

RESERVE_FRACTION = 0.01  # of the pool, kept from new requests so that running ones can grow
GPU_FRACTION = 0.9  # of the memory that is free once weights are loaded; the rest: graphs, logits, fragments
CPU_FRACTION = 0.5
CPU_MOST = 4 << 30  # bytes, by default: other programs need a host's memory, too
STEP_MOST = 0.0625  # of the pools' memory, for a step's tokens while they are staged
OTHERS_LEAST = 0.125  # of it, for staging groups, if a truncated context could take all
BESIDE = 4  # a ladder alone uses host memory of this part of the pools
_USUAL = 1024  # tokens of the sequences for which recurrent states are sized
_SHORT = 512  # tokens of the sequences for which staging areas are sized if pools are too small for all
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 128, 2048  # of an engine, by default


def pool_budget(  # D270: the memory that CUDA reports, not the data sheet's
    free_bytes: int, *, activation_bytes: int, on_gpu: bool, fraction: float | None = None
) -> int:
    """Return the number of bytes available to pools out of the memory that is free after the weights are
    loaded.

    `activation_bytes`: memory that the largest step needs in addition to weights and pools. `fraction`: share
    of the free bytes, which replaces the device's default; it also lifts the default limit for hosts.
    """
    share = fraction or (GPU_FRACTION if on_gpu else CPU_FRACTION)
    budget = int(free_bytes * share) - activation_bytes
    return budget if on_gpu or fraction is not None else min(budget, CPU_MOST)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolPlan:
    """Number of blocks, step size and concurrency of an engine."""

    num_blocks: list[int]  # per layer group
    step_tokens: int  # maximum number of new tokens per step
    sequences: int  # maximum number that run at once

    @property
    def chunk(self) -> int:
        """Maximum number of new tokens in a step: at least one for each sequence."""
        return max(self.step_tokens, self.sequences)


def plan_pools(  # D269: the planner is the engine's own arithmetic
    layout: KVLayout, budget_bytes: int | None, *, sequences: int, max_context: int, step_tokens: int
) -> PoolPlan:
    """Divide `budget_bytes` among `sequences` full-length sequences; None: give them all they can use.

    1. One sequence comes first. It gets the blocks of the longest context that fits in `budget_bytes`
       together with the tokens of a step (with a staged recipe, here a step of one block at most). If this
       context is shorter than the full length, an eighth of the memory is set aside for other sequences'
       staging groups. If not even one block of every layer group fits, there are no blocks at all.
    2. A step of a staged recipe takes as many tokens as fit in the rest, up to a sixteenth of the memory. The
       number of sequences that run at once is limited to the number of tokens in a step.
    3. All groups of a staged recipe get room for as many sequences of 512 tokens as fit at once. If all
       `sequences` fit, staging groups get room for all of them at the maximum length that fits.
    4. With recurrent states, as many sequences of 1,024 tokens as fit at once get their states and room for
       two snapshots each.
    5. The rest is divided in proportion to demand, with staging groups last, as they already have enough for
       those sequences. If all demand is met, steps grow into the remaining memory.

    More memory never makes the longest context shorter.
    """
    limits = {"sequences": sequences, "max_context": max_context}
    wanted = needs.wanted_blocks(layout, **limits, step_tokens=step_tokens)
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
    least = needs.sequence_alone(layout, longest, 1, step_tokens=step_tokens)
    least = _with_states(layout, least, budget_bytes, sequences=limits["sequences"], max_context=max_context)
    wanted = _at_least(needs.wanted_blocks(layout, **limits, step_tokens=step_tokens), least)
    if is_bounded:  # the rest is for other sequences; rounding would otherwise lengthen the context
        blocks = share_blocks(layout, _merged(layout, sealed=least, staging=wanted), budget_bytes, least)
    else:
        fitted = _side_by_side(layout, budget_bytes, least, **limits, step_tokens=step_tokens)
        blocks = share_blocks(layout, _merged(layout, sealed=wanted, staging=fitted), budget_bytes, fitted)
        blocks = share_blocks(layout, wanted, budget_bytes, blocks)
    if blocks == wanted and limits["sequences"] == sequences:  # the unused rest is for longer steps

        def needed(tokens: int) -> list[int]:
            return _at_least(needs.wanted_blocks(layout, **limits, step_tokens=tokens), least)

        steps = range(step_tokens, chunk + 1)
        fits = bisect_left(steps, True, key=lambda tokens: bytes_of(layout, needed(tokens)) > budget_bytes)
        step_tokens = steps[max(0, fits - 1)]
        blocks = needed(step_tokens)
    return PoolPlan(num_blocks=blocks, step_tokens=step_tokens, sequences=limits["sequences"])


def rung_bytes(rungs: list[KVLayout]) -> dict[int, list[int]]:
    """Return the bytes of a block on every colder rung, by layer group; windows have no rungs.

    `rungs`: the layouts of a ladder, first that of the pools; with fewer than two there is no ladder.

    Raises:
        ConfigError: a format isn't smaller than the one before it.
    """
    for before, rung in pairwise(rungs):
        if rung.kv_bytes_per_token >= before.kv_bytes_per_token:
            what = (
                f"takes {rung.kv_bytes_per_token:,.0f} bytes a token, not below the "
                f"{before.kv_bytes_per_token:,.0f} of {before.recipe.name}"
            )
            if rung.recipe == before.recipe:
                what = "is the pool's own" if before is rungs[0] else "is named twice"
            raise ConfigError(
                f"kv_ladder (--kv-ladder) and kv_tier_format (--kv-tier-format) must name ever smaller "
                f"formats, but {rung.recipe.name} {what}"
            )
    return {
        number: [rung.groups[number].block_bytes for rung in rungs[1:]]
        for number, group in enumerate(rungs[0].sealed if rungs[1:] else ())
        if group.group.window is None
    }


def _with_states(
    layout: KVLayout, least: Sequence[int], budget_bytes: int, *, sequences: int, max_context: int
) -> list[int]:
    """Return `least`, increased by as many useful blocks of recurrent states as also fit."""
    least = list(least)
    if layout.states is not None:
        states = layout.states.block_bytes * needs.STATES_EACH
        each = layout.sequence_bytes(min(_USUAL, max_context)) - layout.states.block_bytes + states
        count = min(sequences, (budget_bytes - bytes_of(layout, least)) // each)
        least[-1] = max(least[-1], count * needs.STATES_EACH)
    return least


@dataclass(frozen=True, slots=True)
class _First:  # D272: one long sequence first, then many of 512 tokens
    """The first sequence to get memory."""

    layout: KVLayout
    budget_bytes: int
    step_tokens: int

    def blocks(self, tokens: int) -> list[int]:
        """Return the maximum number of blocks that the sequence holds in each layer group."""
        return needs.sequence_alone(self.layout, tokens, 1, step_tokens=self.step_tokens)

    def longest(self, most: int, *, staging_bytes: float = 0) -> int:
        """Return the number of tokens that fit if staging groups take at least `staging_bytes`, or 0."""

        def is_too_long(tokens: int) -> bool:
            blocks = self.blocks(tokens)
            staging = bytes_of(self.layout, _staging(self.layout, blocks))
            sealed = bytes_of(self.layout, blocks) - staging
            return sealed + max(staging, staging_bytes) > self.budget_bytes

        return bisect_left(range(1, most + 1), True, key=is_too_long)


def _staged_step(layout: KVLayout, step_tokens: int, budget_bytes: int, longest: int) -> int:
    """Return the maximum number of tokens in a step, in complete blocks, that fit in a sixteenth of the
    memory.

    These tokens also fit together with a sequence of `longest` tokens. A single block always fits.
    """
    block = sum(group.block_bytes for group in layout.groups if group.role is Role.RECENT)
    size, most = layout.block_size, int(STEP_MOST * budget_bytes / block)

    def is_too_long(blocks: int) -> bool:
        tokens = min(step_tokens, blocks * size)
        return bytes_of(layout, needs.sequence_alone(layout, longest, 1, step_tokens=tokens)) > budget_bytes

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
    """Return blocks for as many sequences of `_SHORT` tokens as fit; if all fit, staging for longer ones."""

    def blocks(count: int, tokens: int) -> list[int]:
        return _at_least(
            needs.sequences_blocks(layout, tokens, 1, count=count, step_tokens=step_tokens), least
        )

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
    """Number of equally long sequences that run at once."""

    count: int
    limit: GroupLayout | None  # the layer group whose blocks run out first; None: all that may run fit


def at_once(layout: KVLayout, pools: PoolPlan, tokens: int) -> _Crowd:
    """Return the number of sequences of `tokens` tokens that fit in the pools, at their peak of blocks."""
    own = needs.sequence_blocks(layout, tokens, 1, step_tokens=pools.chunk)
    alone = needs.sequence_alone(layout, tokens, 1, step_tokens=pools.chunk)
    fits = [
        max(0, (count - most) // each + 1)
        for count, each, most in zip(pools.num_blocks, own, alone, strict=True)
    ]
    if min(fits) >= pools.sequences:
        return _Crowd(count=pools.sequences, limit=None)
    return _Crowd(count=min(fits), limit=layout.groups[fits.index(min(fits))])


def longest_context(layout: KVLayout, pools: PoolPlan, max_context: int) -> int:
    """Return the length in tokens, up to `max_context`, of the longest sequence that is not refused."""
    return bisect_left(
        range(1, max_context + 1), True, key=lambda tokens: at_once(layout, pools, tokens).count < 1
    )


def share_blocks(
    layout: KVLayout, wanted: Sequence[int], budget_bytes: float, least: Sequence[int] | None = None
) -> list[int]:
    """Return the same fraction of each layer group's wanted blocks, so that all fit in `budget_bytes`.

    No group gets fewer blocks than its `least`, which must fit.
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
    """Return the numbers of blocks for staging groups, and 0 for other groups."""
    return _merged(layout, sealed=[0] * len(blocks), staging=blocks)


def _merged(layout: KVLayout, *, sealed: Sequence[int], staging: Sequence[int]) -> list[int]:
    """Return each group's number of blocks from the list for its kind, `sealed` or `staging`."""
    pairs = zip(layout.groups, sealed, staging, strict=True)
    return [other if group.is_staging else own for group, own, other in pairs]


def reserve_blocks(num_blocks: Sequence[int], fraction: float = RESERVE_FRACTION) -> int:
    """Return the number of blocks in every pool that are withheld from new requests."""
    return min(int(fraction * min(num_blocks)), min(num_blocks) - 1)
