"""Pool sizes, fixed before the first request."""

from kvq.engine.config import EngineConfig
from kvq.errors import OutOfMemory
from kvq.layout import KVLayout
from kvq.sizes import binary, parse_bytes
from kvq.sizing.needs import STATES_EACH
from kvq.sizing.pools import PoolPlan, at_once, longest_context, plan_pools, pool_budget

LENGTHS = (100, 1000)  # lengths of requests in the log, in tokens, in addition to the longest


def planned_pools(
    layout: KVLayout,
    config: EngineConfig,
    *,
    on_gpu: bool,
    max_context: int,
    free_bytes: int | None,
    activation_bytes: int,
) -> PoolPlan:
    """Return the configured pool sizes, or as many blocks as requests could use and free memory can hold.

    `free_bytes`: free memory after loading the weights, or None if unknown. `activation_bytes`: memory that
    the largest step needs in addition to weights and pools.

    Raises:
        ConfigError: `kv_memory` is not a valid size.
        OutOfMemory: not even one block of every layer group fits.
    """
    if config.num_blocks is not None:
        count = max(1, round(config.num_blocks * config.kv_share))
        blocks = [count] * len(layout.groups)
        if layout.states is not None:
            blocks[-1] = min(count, STATES_EACH * config.max_num_seqs)
        return PoolPlan(
            num_blocks=blocks, step_tokens=config.max_num_batched_tokens, sequences=config.max_num_seqs
        )
    budget = None
    if config.kv_memory is not None:
        budget = parse_bytes(config.kv_memory, "kv_memory")
    elif free_bytes is not None:
        budget = pool_budget(
            free_bytes, activation_bytes=activation_bytes, on_gpu=on_gpu, fraction=config.memory_fraction
        )
    pools = plan_pools(
        layout,
        None if budget is None else round(budget * config.kv_share),
        sequences=config.max_num_seqs,
        max_context=max_context,
        step_tokens=config.max_num_batched_tokens,
    )
    if min(pools.num_blocks) < 1:
        smallest = sum(group.block_bytes for group in layout.groups)
        raise OutOfMemory(
            f"the KV pool may take {binary(max(0, budget or 0))}, one block of every layer group takes "
            f"{binary(smallest)}, and none can do without; raise kv_memory (--kv-memory) or memory_fraction "
            f"(--gpu-memory-utilization), or use a smaller format"
        )
    return pools


def describe_pools(layout: KVLayout, pools: PoolPlan, max_context: int) -> str:
    """Describe how many requests of several lengths fit at once, and which resource is the limit."""
    longest = longest_context(layout, pools, max_context)
    parts = []
    for tokens in (*(tokens for tokens in LENGTHS if tokens < longest), longest):
        crowd = at_once(layout, pools, tokens)
        what = "max_num_seqs" if crowd.limit is None else f"{crowd.limit.name} blocks"
        parts.append(f"{crowd.count} of {tokens} tokens ({what})")
    return ", ".join(parts)
