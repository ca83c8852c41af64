"""What a plan says of the server that it predicts: its command line, and options that would hold more."""

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvq.commands.capacity.sizing import SizingOptions
from kvq.errors import ConfigError
from kvq.formats.weights import parse_weight_format
from kvq.layout import BLOCK_SIZE
from kvq.sizing.pools import GPU_FRACTION, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS

if TYPE_CHECKING:
    from kvq.capacity.plan.engine import Engine
    from kvq.capacity.plan.plan import CapacityPlan
    from kvq.capacity.plan.vllm import VllmEngine

_MUCH = 1.05  # more users, for which an option is worth its name


def serve_command(plan: "CapacityPlan", sizing: SizingOptions, step_tokens: int) -> str | None:
    """The `kvq serve` that a plan of these options of `kvq plan` predicts; None where none can be started."""
    if plan.split.gpus > 1 or plan.refused is not None:
        return None
    most = plan.users.paged  # for whose recurrent states room is made
    seats = sizing.sequences or (most if plan.state_bytes else max(most, MAX_NUM_SEQS))
    words = ["--model", served(sizing.model), "--kv", plan.kv]
    for name, value, default in (
        ("weights", rounded_to(sizing.weights), None),
        ("block-size", sizing.block_size, BLOCK_SIZE),
        ("max-model-len", sizing.max_context, None),
        ("max-num-seqs", seats, MAX_NUM_SEQS),
        ("max-num-batched-tokens", step_tokens, MAX_NUM_BATCHED_TOKENS),
        ("gpu-memory-utilization", sizing.memory_fraction, GPU_FRACTION),
    ):
        if value not in (None, default):
            words += [f"--{name}", f"{value}"]
    return "kvq serve " + shlex.join(words)


def users_of_a_shorter_context(
    plan: "CapacityPlan", again: Callable[..., "CapacityPlan"], engine: "Engine | VllmEngine", longest: int
) -> int | None:
    """How many would fit if layer groups shared memory for requests of `longest` tokens; None if no more.

    Layers whose windows slide hold little of a long context, and an engine shares its memory out for the
    longest that it takes. `again` plans the same for another engine.
    """
    if len(plan.num_blocks) < 2 or engine.max_context == longest:
        return None
    users = again(engine=replace(engine, max_context=longest)).users.paged
    return users if users > _MUCH * plan.users.paged else None


def served(model: str) -> str:
    """A folder or hub name as it is; a model of which only the shape is known is somewhere."""
    from kvq.capacity.plan.catalogue import known_models

    return "DIR" if model.lower() in known_models() and not Path(model).is_dir() else model


def rounded_to(weights: str) -> str | None:
    """What --weights rounds to; plain types and NF4 are a checkpoint's own."""
    try:
        parse_weight_format(weights)
    except ConfigError:
        return None
    return weights
