"""How the memory for KV is shared out among the layer groups, for the engine and for the planner."""

import math
from collections.abc import Sequence

from kvq.layout import KVLayout
from kvq.scheduler import most_blocks

RESERVE_FRACTION = 0.01  # of the pool, kept from new requests so that running ones can grow
GPU_FRACTION = 0.9  # of what is free once the weights are loaded; graphs, logits and fragments have the rest
CPU_FRACTION = 0.5
CPU_MOST = 4 << 30  # bytes, unless somebody asks for more: others need a host's memory too
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


def windows_of(layout: KVLayout) -> list[int | None]:
    """Of its layer groups."""
    return [group.group.window for group in layout.groups]


def wanted_blocks(layout: KVLayout, *, sequences: int, max_context: int, step_tokens: int) -> list[int]:
    """The most blocks per layer group that so many sequences of full length could use."""
    size = layout.block_size
    blocks = []
    for window in windows_of(layout):
        tokens = max_context if window is None else min(max_context, window + step_tokens + size)
        blocks.append(sequences * -(-tokens // size))
    return blocks


def sequence_blocks(layout: KVLayout, prompt: int, output: int, *, step_tokens: int) -> list[int]:
    """Blocks per layer group that a sequence holds at most, `step_tokens` being a step's most."""
    return most_blocks(prompt, output, windows_of(layout), layout.block_size, step_tokens)


def bytes_of(layout: KVLayout, blocks: Sequence[int]) -> int:
    """Of so many blocks per layer group."""
    return sum(count * group.block_bytes for count, group in zip(blocks, layout.groups, strict=True))


def share_blocks(layout: KVLayout, wanted: Sequence[int], budget_bytes: int) -> list[int]:
    """Of the blocks that could ever be used, the same share of each group, so that `budget_bytes` hold it."""
    share = min(1.0, max(0, budget_bytes) / bytes_of(layout, wanted))
    return [math.floor(count * share) for count in wanted]


def reserve_blocks(num_blocks: Sequence[int], fraction: float = RESERVE_FRACTION) -> int:
    """Blocks of every pool that are kept from new requests."""
    return min(int(fraction * min(num_blocks)), min(num_blocks) - 1)
