"""Whether a request can ever fit: its worst case beside an empty pool."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvq.errors import RequestError
from kvq.scheduler.config import SchedulerConfig
from kvq.scheduler.request import Request


class Reach(NamedTuple):
    """Which tokens a layer group keeps; None for all."""

    window: int | None
    limit: int | None
    is_state: bool = False  # none, but one block a sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolShape:
    """What the pools could hold if nobody used them."""

    num_blocks: list[int]  # per layer group
    windows: list[int | None]  # per layer group
    block_size: int  # tokens
    limits: list[int | None] | None = None  # per layer group, if any has one
    state_group: int | None = None  # the layer group of recurrent states

    @property
    def reaches(self) -> list[Reach]:
        """Per layer group."""
        limits = [None] * len(self.windows) if self.limits is None else self.limits
        pairs = enumerate(zip(self.windows, limits, strict=True))
        return [Reach(window, limit, group == self.state_group) for group, (window, limit) in pairs]


def worst_case(request: Request, max_tokens: int, shape: PoolShape, chunk: int) -> list[int]:
    """Blocks per layer group that a request holds at most; `chunk`: the most tokens of one step."""
    return most_blocks(
        request.prompt_length,
        max_tokens,
        shape.reaches,
        shape.block_size,
        chunk,
        num_branches=request.num_branches,
    )


def most_blocks(
    prompt_tokens: int,
    max_tokens: int,
    reaches: Sequence[Reach],
    block_size: int,
    chunk: int,
    *,
    num_branches: int = 1,
) -> list[int]:
    """Blocks per layer group, each with its window and limit: the prompt once, the rest per branch.

    A sliding window leaves the prompt behind, so in the end its blocks may all be the branches' own.
    The last generated token needs no slot. `chunk`: the most tokens of one step.
    """
    size, length = block_size, prompt_tokens + max(max_tokens, 1) - 1
    blocks = []
    for window, limit, is_state in reaches:
        if is_state:
            blocks.append(num_branches)
            continue
        end = total = -(-length // size) if limit is None else -(-min(length, limit) // size)
        if window is not None:  # before a commit a chunk lies beside the window that it sees
            total = min(total, -(-(window + min(chunk, length)) // size) + 1)
        own = min(total, max(0, end - prompt_tokens // size))
        blocks.append(total + (num_branches - 1) * own)
    return blocks


def check_room(prompt_length: int, max_tokens: int | None, max_context: int) -> int:
    """How many tokens a context leaves after a prompt.

    Raises:
        RequestError: fewer than are asked for, or none.
    """
    room = max_context - prompt_length
    if room < (max_tokens or 1):
        raise RequestError(
            f"{prompt_length} prompt tokens and max_tokens={max_tokens} are more than the context of "
            f"{max_context} tokens; shorten one of them"
        )
    return room


def resolve_max_tokens(request: Request, shape: PoolShape, config: SchedulerConfig) -> int:
    """How many tokens a request may generate; for None as many as context and pool allow.

    Raises:
        RequestError: it can never fit, with the numbers.
    """
    asked = request.max_tokens
    room = check_room(request.prompt_length, asked, config.max_context)
    if request.num_branches > config.max_num_seqs:
        raise RequestError(
            f"the request asks for {request.num_branches} sequences side by side, the engine runs at most "
            f"{config.max_num_seqs}; ask for fewer, or raise max_num_seqs (or kv_memory, if that allows no "
            f"more)"
        )
    chunk = config.max_num_batched_tokens
    _check(request, 1 if asked is None else asked, shape, chunk)
    if asked is not None:
        return asked

    def is_beyond(tokens: int) -> bool:
        return not _fits(worst_case(request, tokens, shape, chunk), shape)

    room = room if request.most_tokens is None else min(room, request.most_tokens)
    return bisect_left(range(1, room + 1), True, key=is_beyond)  # the worst case grows with max_tokens


def _fits(need: list[int], shape: PoolShape) -> bool:
    return all(blocks <= total for blocks, total in zip(need, shape.num_blocks, strict=True))


def _check(request: Request, max_tokens: int, shape: PoolShape, chunk: int) -> None:
    need = worst_case(request, max_tokens, shape, chunk)
    if _fits(need, shape):
        return
    many = f"{request.num_branches} times " if request.num_branches > 1 else ""
    raise RequestError(
        f"the request can never fit: {request.prompt_length} prompt tokens and {many}max_tokens={max_tokens} "
        f"need {' and '.join(map(str, need))} blocks of {shape.block_size} tokens, the pool has "
        f"{' and '.join(map(str, shape.num_blocks))}; ask for fewer tokens, or give the pool more memory"
    )
