"""Plans on the terminal: memory by term, users, rates, and the predicted kvq and vLLM servers.

The output suggests options with which these servers would fit more users.
"""

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvq.capacity.plan import vllm
from kvq.capacity.plan.catalogue import known_models
from kvq.capacity.plan.gpus import Gpu
from kvq.capacity.plan.memory import Engine
from kvq.capacity.plan.plan import CapacityPlan
from kvq.capacity.plan.vllm import VllmEngine, own_type
from kvq.commands.capacity.sizing import PlanOptions, SizingOptions
from kvq.commands.shared.declare import given_options, picked
from kvq.commands.shared.terminal import console, print_columns, text_table
from kvq.errors import ConfigError
from kvq.evals.report.page import Columns, columns_of
from kvq.formats.weights import parse_weight_format
from kvq.layout import BLOCK_SIZE
from kvq.sizes import binary, decimal, parse_bytes
from kvq.sizing.pools import GPU_FRACTION, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS

_MUCH = 1.05  # smallest gain in users, as a factor, for which an option is suggested


def serve_command(plan: CapacityPlan, sizing: SizingOptions, step_tokens: int) -> str | None:
    """Return the `kvq serve` command whose memory a plan predicts, or None if kvq can't serve the plan."""
    if plan.split.gpus > 1 or plan.refused is not None:
        return None
    most = plan.users.paged  # each user's recurrent states take memory
    max_num_seqs = sizing.sequences or (most if plan.state_bytes else max(most, MAX_NUM_SEQS))
    options = (
        ("weights", _rounded_to(sizing.weights), None),
        ("block-size", sizing.block_size, BLOCK_SIZE),
        ("max-model-len", sizing.max_context, None),
        ("max-num-seqs", max_num_seqs, MAX_NUM_SEQS),
        ("max-num-batched-tokens", step_tokens, MAX_NUM_BATCHED_TOKENS),
        ("gpu-memory-utilization", sizing.memory_fraction, GPU_FRACTION),
    )
    return _command_line("kvq serve", ["--model", _path_of(sizing.model), "--kv", plan.kv], options)


def _command_line(command: str, words: list[str], options: Iterable[tuple[str, object, object]]) -> str:
    """Return a command line with `words` and all options (name, value, default) with non-default values."""
    for name, value, default in options:
        if value not in (None, default):
            words = [*words, f"--{name}", f"{value}"]
    return f"{command} {shlex.join(words)}"


def users_at_context(  # D273: by default, memory is divided for the model's full context
    plan: CapacityPlan, again: Callable[..., CapacityPlan], engine: Engine, longest: int
) -> int | None:
    """Return the number of users that fit if the longest context is `longest`, or None if the gain is small.

    Layers with sliding windows store little of a long context, and an engine divides its memory among layer
    groups for its longest context. `again` repeats the plan for another engine.
    """
    if len(plan.num_blocks) < 2 or engine.max_context == longest:
        return None
    users = again(engine=replace(engine, max_context=longest)).users.paged
    return users if users > _MUCH * plan.users.paged else None


def _path_of(model: str) -> str:
    """Return a folder or hub name unchanged, or DIR for the name of a model in the catalogue."""
    return "DIR" if model.lower() in known_models() and not Path(model).is_dir() else model


def _rounded_to(weights: str) -> str | None:
    """Return the format to which --weights rounds, or None for unquantized dtypes and NF4."""
    try:
        parse_weight_format(weights)
    except ConfigError:
        return None
    return weights


def vllm_engine(sizing: SizingOptions, options: "PlanOptions", gpu: Gpu) -> VllmEngine:
    """Return vLLM's settings on a GPU, with vLLM's own defaults for omitted options."""
    values = picked(sizing, "block_size", "memory_fraction") | picked(options, "step_tokens")
    typed = {name: value for name, value in values.items() if name in given_options()}
    return replace(
        VllmEngine.on(gpu),
        **picked(sizing, "sequences", "max_context"),
        runtime_bytes=round(sizing.runtime_gb * 1e9),
        kv_memory=None if options.kv_memory is None else parse_bytes(options.kv_memory, "--kv-memory"),
        **typed,
    )


def vllm_server(plan: CapacityPlan, sizing: SizingOptions, engine: VllmEngine, gpu: Gpu) -> dict[str, Any]:
    """Return the `vllm serve` command whose memory a plan predicts, and its default --max-num-seqs."""
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
    model = _path_of(sizing.model) if _rounded_to(sizing.weights) is None else "DIR"
    return {"serve": _command_line("vllm serve", [model], options), "default_num_seqs": max_num_seqs}


def vllm_remarks(rows: list[dict[str, Any]], sizing: SizingOptions) -> list[str]:
    """Return notes about vLLM's command lines."""
    lines = []
    if (rounded := _rounded_to(sizing.weights)) is not None:
        lines.append(f"vLLM rounds no weights to {rounded}: DIR is a checkpoint that holds them so.")
    if (kv := next((row["kv"] for row in rows if own_type(row["kv"]) is None), None)) is not None:
        additional = f'{{"kvq": "{kv}"}}'
        lines.append(
            f"kvq's formats need kvq beside vLLM; vLLM 0.32 takes --additional-config '{additional}' in the "
            "place of --kv-cache-dtype."
        )
    return lines


def columns(rows: list[dict[str, Any]]) -> Columns:
    """Return the columns of a table of plans, keyed by the fields of a row."""
    head, first = "contiguous_users", rows[0]
    found = columns_of("plan") | {head: (f"in slots of {first['slot_tokens']:,}", ",d")}
    if first["gpus_needed"] is None:
        del found["gpus_needed"]
    return found


def show(
    rows: list[dict[str, Any]], *, assumed: bool, max_num_seqs: int | None, remarks: Sequence[str] = ()
) -> None:
    """Print plans.

    `assumed`: whether efficiencies are assumed rather than measured; `max_num_seqs`: value of --max-num-seqs;
    `remarks`: lines to print at the end.
    """
    out = console()
    firsts = {row["gpu"]: row for row in reversed(rows)}
    for gpu in dict.fromkeys(row["gpu"] for row in rows):
        first = firsts[gpu]
        spread = first["tensor_parallel"] * first["pipeline_parallel"]
        out.print(f"{first['model']} on {f'{spread} x ' if spread > 1 else ''}{gpu}, per GPU")
        cells = [
            (
                term["name"] + (f", {first['kv']}" if term["name"] == "KV pool" else ""),
                decimal(term["bytes"]),
                binary(term["bytes"]),
                term["formula"],
            )
            for term in first["terms"]
        ]
        out.print(text_table(("", "decimal", "binary", "formula"), cells, ("", "formula"), no_wrap=False))
        out.print()
    print_columns(rows, columns(rows))
    if "num_gpu_blocks" in rows[0]:
        out.print("figures that vLLM prints when it starts")
        print_columns(rows, columns_of("plan, vllm"))
    if "utilization" in rows[0]:
        out.print("at that rate")
        at_once = ["too many" if row["in_flight"] is None else f"{row['in_flight']:,}" for row in rows]
        shown = [row | {"at_once": n} for row, n in zip(rows, at_once, strict=True)]
        print_columns(shown, columns_of("plan, at a rate"))
    for line in (*_remarks(rows, assumed=assumed, max_num_seqs=max_num_seqs), *remarks):
        out.print(line, soft_wrap=True)


def _remarks(rows: list[dict[str, Any]], *, assumed: bool, max_num_seqs: int | None) -> list[str]:
    """Return notes about the figures, and the command lines of the predicted servers."""
    lines = []
    if rows[0]["tokens_per_s"] is not None:
        lines.append(
            f"Speed is a roofline at as many users as fit, with {'assumed' if assumed else 'measured'} "
            f"efficiencies; $ are for generated tokens at full load."
        )
    if rows[0]["state_bytes"]:
        lines.append(
            f"Recurrent states take {binary(rows[0]['state_bytes'])} of a GPU for every sequence, whatever "
            f"its length; their pool also has room for two snapshots of each if memory allows."
        )
    if rows[0]["refused"] is not None and rows[0]["engine"] == "kvq":
        lines.append(
            f"kvq does not run {rows[0]['model']}: {rows[0]['refused']}; the plan is for an engine that does."
        )
    elif rows[0]["serve"] is None:
        lines.append(
            "kvq serve runs on one GPU; this is the fullest GPU of an engine that splits the model so."
        )
    else:
        what = "that GPU" if rows[0]["tensor_parallel"] * rows[0]["pipeline_parallel"] == 1 else "those GPUs"
        lines.append(f"The plan predicts this server, on {what} without other processes:")
    for row in rows:
        what = f"{row['gpu']}, {row['kv']}:"
        if row["serve"] is not None:
            lines.append(f"{what} {row['serve']}")
            if max_num_seqs is None and row["max_users"] > (most := row["default_num_seqs"]):
                lines.append(f"  without --max-num-seqs at most {most} requests run at once")
        if row["users_at_context"] is not None:
            lines.append(
                f"{what} {row['users_at_context']:,} users instead of {row['max_users']:,} with "
                f"--max-model-len {row['context']}: layer groups share memory by the longest context"
            )
    return lines
