"""Predicted servers: the command line of `kvq serve` for a plan, and options that would hold more users."""

import shlex
from collections.abc import Callable, Iterable
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

_MUCH = 1.05  # times as many users, for which an option is worth a line


def serve_command(plan: "CapacityPlan", sizing: SizingOptions, step_tokens: int) -> str | None:
    """Return the `kvq serve` command that a plan predicts; None if kvq can't serve it."""
    if plan.split.gpus > 1 or plan.refused is not None:
        return None
    most = plan.users.paged  # recurrent states take memory for each of them
    max_num_seqs = sizing.sequences or (most if plan.state_bytes else max(most, MAX_NUM_SEQS))
    options = (
        ("weights", rounded_to(sizing.weights), None),
        ("block-size", sizing.block_size, BLOCK_SIZE),
        ("max-model-len", sizing.max_context, None),
        ("max-num-seqs", max_num_seqs, MAX_NUM_SEQS),
        ("max-num-batched-tokens", step_tokens, MAX_NUM_BATCHED_TOKENS),
        ("gpu-memory-utilization", sizing.memory_fraction, GPU_FRACTION),
    )
    return command_line("kvq serve", ["--model", path_of(sizing.model), "--kv", plan.kv], options)


def command_line(command: str, words: list[str], options: Iterable[tuple[str, object, object]]) -> str:
    """Return a command with its words, and those of (name, value, default) whose value is no default."""
    for name, value, default in options:
        if value not in (None, default):
            words = [*words, f"--{name}", f"{value}"]
    return f"{command} {shlex.join(words)}"


def users_at_context(  # D273: shared out for the model's whole context
    plan: "CapacityPlan", again: Callable[..., "CapacityPlan"], engine: "Engine | VllmEngine", longest: int
) -> int | None:
    """Return how many users fit if the engine's longest context is `longest`; None if hardly more.

    Layers with sliding windows hold little of a long context, and an engine divides its memory among layer
    groups for its longest context. `again` makes the same plan for another engine.
    """
    if len(plan.num_blocks) < 2 or engine.max_context == longest:
        return None
    users = again(engine=replace(engine, max_context=longest)).users.paged
    return users if users > _MUCH * plan.users.paged else None


def path_of(model: str) -> str:
    """Return a folder or hub name unchanged, and DIR for a model whose shape alone is known."""
    from kvq.capacity.plan.catalogue import known_models

    return "DIR" if model.lower() in known_models() and not Path(model).is_dir() else model


def rounded_to(weights: str) -> str | None:
    """Return the format that --weights rounds to; None for unquantized types and NF4."""
    try:
        parse_weight_format(weights)
    except ConfigError:
        return None
    return weights
