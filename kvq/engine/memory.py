"""How large the pools are: decided once, before the first request."""

import math

from kvq.engine.config import EngineConfig
from kvq.errors import OutOfMemory
from kvq.layout import KVLayout
from kvq.sizes import binary, parse_bytes
from kvq.sizing.pools import pool_budget, share_blocks, wanted_blocks


def planned_blocks(
    layout: KVLayout,
    config: EngineConfig,
    *,
    on_gpu: bool,
    max_context: int,
    free_bytes: int | None,
    activation_bytes: int,
) -> list[int]:
    """Blocks per layer group: as configured, or as many as free memory holds and could ever be used.

    `free_bytes`: once the weights are loaded; None: nobody knows. `activation_bytes`: what the largest step
    needs beside weights and pools.

    Raises:
        ConfigError: kv_memory is not a size.
        OutOfMemory: not one block fits.
    """
    if config.num_blocks is not None:
        return [config.num_blocks] * len(layout.groups)
    wanted = wanted_blocks(
        layout,
        sequences=config.max_num_seqs,
        max_context=max_context,
        step_tokens=config.max_num_batched_tokens,
    )
    if config.kv_memory is not None:
        budget = parse_bytes(config.kv_memory, "kv_memory")
    elif free_bytes is None:
        return wanted
    else:
        budget = pool_budget(
            free_bytes, activation_bytes=activation_bytes, on_gpu=on_gpu, fraction=config.memory_fraction
        )
    blocks = share_blocks(layout, wanted, budget)
    if min(blocks) < 1:
        smallest = sum(group.block_bytes for group in layout.groups)
        raise OutOfMemory(
            f"the KV pool may take {binary(max(0, budget))}, one block of every layer group takes "
            f"{binary(smallest)}; raise kv_memory (--kv-memory) or memory_fraction "
            f"(--gpu-memory-utilization), or use a smaller format"
        )
    return blocks


def swap_slots(layout: KVLayout, config: EngineConfig, num_blocks: list[int]) -> list[int] | None:
    """Host slots per layer group for `swap_memory`, shared out as the pools are; None for no swapping."""
    budget = parse_bytes(config.swap_memory, "swap_memory")
    if not budget:
        return None
    total = sum(n * group.block_bytes for n, group in zip(num_blocks, layout.groups, strict=True))
    return [math.floor(n * budget / total) for n in num_blocks]
