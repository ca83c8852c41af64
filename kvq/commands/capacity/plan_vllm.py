"""`kvq plan --engine vllm`: vLLM's own defaults, the figures of its start, and its command line."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvq.commands.capacity.plan_options import PlanOptions
from kvq.commands.capacity.plan_serve import command_line, path_of, rounded_to
from kvq.commands.capacity.sizing import SizingOptions
from kvq.commands.shared.options import given_options, picked
from kvq.evals.report.columns import Columns
from kvq.sizes import parse_bytes

if TYPE_CHECKING:
    from kvq.capacity.plan.gpus import Gpu
    from kvq.capacity.plan.plan import CapacityPlan
    from kvq.capacity.plan.vllm import VllmEngine

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


def vllm_figures(plan: "CapacityPlan") -> dict[str, Any]:
    """Return the figures that vLLM prints when it starts; an empty dict for another engine."""
    if (cache := plan.vllm) is None:
        return {}
    return {
        "num_gpu_blocks": cache.num_gpu_blocks,
        "kv_cache_tokens": cache.tokens,
        "max_model_len": cache.max_model_len,
        "max_concurrency": cache.max_concurrency,
    }


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
