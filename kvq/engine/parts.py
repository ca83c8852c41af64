"""What an engine is made of, sized for its model and its device."""

import logging

from kvq.blockmgr import BlockManager
from kvq.cache.memory import available_bytes
from kvq.engine.config import EngineConfig
from kvq.engine.dry_run import dry_run
from kvq.engine.memory import planned_blocks, swap_slots
from kvq.engine.runner import Runner
from kvq.models import Model
from kvq.scheduler import MeasuredCosts, Scheduler, SchedulerConfig
from kvq.sizes import decimal
from kvq.sizing.pools import bytes_of, reserve_blocks

_log = logging.getLogger("kvq")


def build_parts(model: Model, config: EngineConfig, max_context: int) -> tuple[Scheduler, Runner]:
    """Size everything: a step of full size over a small pool first, then the real pools."""
    layout, device = model.layout, model.weights.device
    costs, activation_bytes = MeasuredCosts(), 0
    if config.num_blocks is None and config.kv_memory is None:
        _log.info("measuring a step of %d tokens", config.max_num_batched_tokens)
        tried = dry_run(model, max_num_batched_tokens=config.max_num_batched_tokens, max_context=max_context)
        costs, activation_bytes = MeasuredCosts(prefill_token_s=tried.token_s), tried.activation_bytes
    num_blocks = planned_blocks(
        layout,
        config,
        on_gpu=device.type == "cuda",
        max_context=max_context,
        free_bytes=available_bytes(device),
        activation_bytes=activation_bytes,
    )
    host_slots = swap_slots(layout, config, num_blocks)
    _log.info("making the KV pool, %s", decimal(bytes_of(layout, num_blocks)))
    runner = Runner(
        model,
        num_blocks=num_blocks,
        host_slots=host_slots,
        swap_folder=config.swap_folder,
        max_num_seqs=config.max_num_seqs,
        max_context=max_context,
    )
    manager = BlockManager(
        num_blocks=num_blocks,
        block_size=layout.block_size,
        windows=[group.group.window for group in layout.groups],
        host_slots=host_slots,
        reserve_blocks=reserve_blocks(num_blocks, config.reserve_fraction),
    )
    scheduler = Scheduler(
        manager,
        SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
            max_context=max_context,
            prefix_caching=config.prefix_caching,
            max_step_stretch=config.max_step_stretch,
            aging_s=config.aging_s,
            itl_slo_s=config.itl_slo_s,
            ttft_slo_s=config.ttft_slo_s,
        ),
        costs,
    )
    return scheduler, runner
