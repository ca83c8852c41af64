"""Fit check: determines whether a request fits into an empty pool even in the worst case."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvq.errors import RequestError
from kvq.scheduler.config import SchedulerConfig


class Reach(NamedTuple):
    """Tokens that a layer group keeps; None means no restriction."""

    window: int | None = None
    limit: int | None = None
    is_state: bool = False  # no tokens, but one block per sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolShape:
    """Sizes of the empty pools."""

    num_blocks: list[int]  # by layer group
    reaches: list[Reach]  # by layer group
    block_size: int  # tokens


def most_blocks(
    prompt_tokens: int,
    max_tokens: int,
    reaches: Sequence[Reach],
    block_size: int,
    chunk: int,
    *,
    num_branches: int = 1,
) -> list[int]:
    """Return the maximum number of blocks per layer group that a request can hold at once.

    The prompt counts once, later tokens count per branch. A sliding window moves past the prompt, so each
    branch may end up with separate blocks for its entire window. The last generated token needs no slot.
    `chunk`: maximum number of tokens in one step.
    """
    size, length = block_size, prompt_tokens + max(max_tokens, 1) - 1
    blocks = []
    for window, limit, is_state in reaches:
        if is_state:
            blocks.append(num_branches)
            continue
        end = total = -(-length // size) if limit is None else -(-min(length, limit) // size)
        if window is not None:  # until a commit, a chunk coexists with its window
            total = min(total, -(-(window + min(chunk, length)) // size) + 1)
        own = min(total, max(0, end - prompt_tokens // size))
        blocks.append(total + (num_branches - 1) * own)
    return blocks


def check_room(prompt_length: int, max_tokens: int | None, max_context: int) -> int:
    """Return the number of tokens that fit into the context after a prompt.

    Raises:
        RequestError: the request needs more tokens than fit, or none fit.
    """
    room = max_context - prompt_length
    if room < (max_tokens or 1):
        raise RequestError(
            f"{prompt_length} prompt tokens and max_tokens={max_tokens} are more than the context of "
            f"{max_context} tokens; shorten one of them"
        )
    return room


def resolve_max_tokens(
    prompt_tokens: int,
    max_tokens: int | None,
    shape: PoolShape,
    config: SchedulerConfig,
    *,
    most_tokens: int | None = None,
    num_branches: int = 1,
) -> int:
    """Return the number of tokens that a request may generate: `max_tokens`, or by default as many as fit,
    up to `most_tokens`.

    Raises:
        RequestError: the request can never fit; the message has the numbers.
    """
    room = check_room(prompt_tokens, max_tokens, config.max_context)
    if num_branches > config.max_num_seqs:
        raise RequestError(
            f"the request asks for {num_branches} sequences side by side, the engine runs at most "
            f"{config.max_num_seqs}; ask for fewer, or raise max_num_seqs (or kv_memory, if that allows no "
            f"more)"
        )

    def need(tokens: int) -> list[int]:
        size, chunk = shape.block_size, config.max_num_batched_tokens
        return most_blocks(prompt_tokens, tokens, shape.reaches, size, chunk, num_branches=num_branches)

    least = 1 if max_tokens is None else max_tokens
    if not _fits(need(least), shape):
        many = f"{num_branches} times " if num_branches > 1 else ""
        raise RequestError(
            f"the request can never fit: {prompt_tokens} prompt tokens and {many}max_tokens={least} need "
            f"{' and '.join(map(str, need(least)))} blocks of {shape.block_size} tokens, the pool has "
            f"{' and '.join(map(str, shape.num_blocks))}; ask for fewer tokens, or give the pool more memory"
        )
    if max_tokens is not None:
        return max_tokens
    room = room if most_tokens is None else min(room, most_tokens)
    # The worst case grows with the tokens to generate.
    return bisect_left(range(1, room + 1), True, key=lambda tokens: not _fits(need(tokens), shape))


def _fits(need: list[int], shape: PoolShape) -> bool:
    return all(blocks <= total for blocks, total in zip(need, shape.num_blocks, strict=True))
