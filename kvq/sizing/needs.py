"""Block demand per layer group, of one sequence and of several at once."""

from collections.abc import Sequence

from kvq.layout import GroupLayout, KVLayout, Role
from kvq.scheduler import Reach, most_blocks

STATES_EACH = 3  # blocks of recurrent states that a sequence benefits from: its own, and two snapshots


def wanted_blocks(layout: KVLayout, *, sequences: int, max_context: int, step_tokens: int) -> list[int]:
    """Return the most blocks per layer group that `sequences` sequences of full length could use."""
    size = layout.block_size
    blocks = []
    for group, shared in zip(layout.groups, step_blocks(layout, step_tokens), strict=True):
        if group.role is Role.STATES:
            blocks.append(sequences * STATES_EACH)
            continue
        tokens, window = min(max_context, group.limit or max_context), group.group.window
        if window is not None:
            tokens = min(tokens, window + size + (0 if shared else step_tokens))
        blocks.append(sequences * -(-tokens // size) + shared)
    return blocks


def step_blocks(layout: KVLayout, step_tokens: int) -> list[int]:
    """Return the blocks per layer group for a step's tokens, if they are not counted with each sequence.

    RECENT groups have such blocks for all sequences together, other groups have 0. A step that is planned
    while another runs has one token per sequence, for which the sequence's own blocks have room.
    """
    blocks = -(-step_tokens // layout.block_size)
    return [blocks if group.role is Role.RECENT else 0 for group in layout.groups]


def sequence_blocks(layout: KVLayout, prompt: int, output: int, *, step_tokens: int) -> list[int]:
    """Return the most blocks per layer group of a sequence, with steps of at most `step_tokens`.

    The blocks of `step_blocks` are not included.
    """
    blocks = []
    for group, shared in zip(layout.groups, step_blocks(layout, step_tokens), strict=True):
        chunk = 0 if shared else step_tokens
        blocks += most_blocks(prompt, output, [_reach(group)], layout.block_size, chunk)
    return blocks


def sequence_alone(layout: KVLayout, prompt: int, output: int, *, step_tokens: int) -> list[int]:
    """Return the most blocks per layer group of a sequence, including those of a step's tokens.

    `kvq.scheduler.fit` refuses requests that need more than there is.
    """
    reaches = [_reach(group) for group in layout.groups]
    return most_blocks(prompt, output, reaches, layout.block_size, step_tokens)


def sequences_blocks(
    layout: KVLayout, prompt: int, output: int, *, count: int, step_tokens: int
) -> list[int]:
    """Return the blocks per layer group for `count` sequences, and for the tokens of the step they share."""
    own = sequence_blocks(layout, prompt, output, step_tokens=step_tokens)
    alone = sequence_alone(layout, prompt, output, step_tokens=step_tokens)
    return [(count - 1) * each + most for each, most in zip(own, alone, strict=True)]


def _reach(group: GroupLayout) -> Reach:
    return Reach(group.group.window, group.limit, group.role is Role.STATES)


def bytes_of(layout: KVLayout, blocks: Sequence[int]) -> int:
    """Return the bytes of `blocks` blocks per layer group."""
    return sum(count * group.block_bytes for count, group in zip(blocks, layout.groups, strict=True))
