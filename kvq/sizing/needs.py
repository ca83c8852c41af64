"""Block demand of one sequence, and of several at once, in each layer group."""

from collections.abc import Sequence

from kvq.layout import GroupLayout, KVLayout, Role
from kvq.scheduler import Reach, most_blocks

STATES_EACH = 3  # blocks of recurrent states that a sequence benefits from: its own, and two snapshots


def wanted_blocks(layout: KVLayout, *, sequences: int, max_context: int, step_tokens: int) -> list[int]:
    """Return the maximum number of blocks per layer group that `sequences` full-length sequences use."""
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
    """Return the number of blocks in each layer group for a step's tokens, unless counted for each sequence.

    RECENT groups have such blocks, shared by all sequences; other groups have 0. A step planned while another
    is running has one token per sequence, which fits in the sequence's own blocks.
    """
    blocks = -(-step_tokens // layout.block_size)
    return [blocks if group.role is Role.RECENT else 0 for group in layout.groups]


def sequence_blocks(layout: KVLayout, prompt: int, output: int, *, step_tokens: int) -> list[int]:
    """Return the maximum number of blocks of a sequence in each layer group; steps have up to `step_tokens`.

    The blocks counted by `step_blocks` are not included.
    """
    blocks = []
    for group, shared in zip(layout.groups, step_blocks(layout, step_tokens), strict=True):
        chunk = 0 if shared else step_tokens
        blocks += most_blocks(prompt, output, [_reach(group)], layout.block_size, chunk)
    return blocks


def sequence_alone(layout: KVLayout, prompt: int, output: int, *, step_tokens: int) -> list[int]:
    """Return the maximum number of blocks of a sequence in each layer group, including those for a step's
    tokens.

    `kvq.scheduler.fit` refuses requests that need more blocks than the pools have.
    """
    reaches = [_reach(group) for group in layout.groups]
    return most_blocks(prompt, output, reaches, layout.block_size, step_tokens)


def sequences_blocks(
    layout: KVLayout, prompt: int, output: int, *, count: int, step_tokens: int
) -> list[int]:
    """Return the blocks per layer group for `count` sequences and the tokens of the step they share."""
    own = sequence_blocks(layout, prompt, output, step_tokens=step_tokens)
    alone = sequence_alone(layout, prompt, output, step_tokens=step_tokens)
    return [(count - 1) * each + most for each, most in zip(own, alone, strict=True)]


def _reach(group: GroupLayout) -> Reach:
    return Reach(group.group.window, group.limit, group.role is Role.STATES)


def bytes_of(layout: KVLayout, blocks: Sequence[int]) -> int:
    """Return the total bytes of `blocks`, which has one number of blocks per layer group."""
    return sum(count * group.block_bytes for count, group in zip(blocks, layout.groups, strict=True))
