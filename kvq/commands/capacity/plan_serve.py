"""Predicted servers: the command lines of kvq and vLLM for a plan, and options that would hold more users."""

import shlex
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq.commands.capacity.sizing import PlanOptions, SizingOptions
from kvq.commands.shared.options import given_options, picked
from kvq.errors import ConfigError
from kvq.evals.report.page import Columns
from kvq.formats.weights import parse_weight_format
from kvq.layout import BLOCK_SIZE
from kvq.sizes import parse_bytes
from kvq.sizing.pools import GPU_FRACTION, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS

if TYPE_CHECKING:
    from kvq.capacity.plan.engine import Engine
    from kvq.capacity.plan.gpus import Gpu
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
    plan: "CapacityPlan", again: Callable[..., "CapacityPlan"], engine: "Engine", longest: int
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


COLUMNS: Columns = {
    "gpu": ("GPU", ""),
    "kv": ("KV", ""),
    "num_gpu_blocks": ("blocks", ",d"),
    "kv_cache_tokens": ("KV cache size, tokens", ",d"),
    "max_model_len": ("request, tokens", ",d"),
    "max_concurrency": ("maximum concurrency", ".2f"),
}


def vllm_engine(sizing: SizingOptions, options: "PlanOptions", gpu: "Gpu") -> "VllmEngine":
    """Return vLLM on that GPU, with its own defaults for options that were not given."""
    from kvq.capacity.plan.vllm import VllmEngine

    values = picked(sizing, "block_size", "memory_fraction") | picked(options, "step_tokens")
    typed = {name: value for name, value in values.items() if name in given_options()}
    return replace(
        VllmEngine.on(gpu),
        **picked(sizing, "sequences", "max_context"),
        runtime_bytes=round(sizing.runtime_gb * 1e9),
        kv_memory=None if options.kv_memory is None else parse_bytes(options.kv_memory, "--kv-memory"),
        **typed,
    )


def vllm_server(
    plan: "CapacityPlan", sizing: SizingOptions, engine: "VllmEngine", gpu: "Gpu"
) -> dict[str, Any]:
    """Return the `vllm serve` command that a plan predicts, and its default number of sequences."""
    from kvq.capacity.plan import vllm

    step_tokens, max_num_seqs = vllm.batch_defaults(gpu)
    plain = vllm.own_type(plan.kv)
    options = (
        ("kv-cache-dtype", None if plain else vllm.cache_dtype(plan.kv), None),
        ("dtype", vllm.OWN_TYPES.get(plain or sizing.weights), None),
        ("tensor-parallel-size", plan.split.tensor, 1),
        ("pipeline-parallel-size", plan.split.pipeline, 1),
        ("block-size", engine.block_size, vllm.BLOCK_SIZE),
        ("max-model-len", engine.max_context, None),
        ("max-num-seqs", engine.sequences or max(plan.users.paged, max_num_seqs), max_num_seqs),
        ("max-num-batched-tokens", engine.step_tokens, step_tokens),
        ("gpu-memory-utilization", engine.memory_fraction, vllm.GPU_FRACTION),
        ("kv-cache-memory-bytes", engine.kv_memory, None),
    )
    model = path_of(sizing.model) if rounded_to(sizing.weights) is None else "DIR"
    return {"serve": command_line("vllm serve", [model], options), "default_num_seqs": max_num_seqs}


def vllm_remarks(rows: list[dict[str, Any]], sizing: SizingOptions) -> list[str]:
    """Return notes on the command lines of vLLM."""
    from kvq.capacity.plan.vllm import own_type

    lines = []
    if (rounded := rounded_to(sizing.weights)) is not None:
        lines.append(f"vLLM rounds no weights to {rounded}: DIR is a checkpoint that holds them so.")
    if (kv := next((row["kv"] for row in rows if own_type(row["kv"]) is None), None)) is not None:
        additional = f'{{"kvq": "{kv}"}}'
        lines.append(
            f"kvq's formats need kvq beside vLLM; vLLM 0.32 takes --additional-config '{additional}' in the "
            "place of --kv-cache-dtype."
        )
    return lines
