"""`kvq plan --verify`: start engines on this machine, and compare their memory with the plan."""

import gc
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from kvq.capacity.plan.catalogue import known_models
from kvq.commands.capacity.sizing import PlanOptions, SizingOptions
from kvq.commands.shared.declare import given_options, picked
from kvq.commands.shared.progress import status
from kvq.commands.shared.results import FinishedRows, result_of
from kvq.commands.shared.terminal import echo, print_columns, say_model
from kvq.errors import ConfigError
from kvq.evals.report.page import columns_of
from kvq.sizes import decimal
from kvq.sizing.needs import bytes_of
from kvq.sizing.pools import MAX_NUM_SEQS

if TYPE_CHECKING:
    from kvq.engine.config import EngineConfig
    from kvq.models.loading.prepared import PreparedModel

_ALLOWED = {
    *("model", "kv", "verify", "kv_memory", "json_path", "block_size", "weights", "sequences"),
    *("step_tokens", "max_context", "memory_fraction"),
}


def run(formats: list[str], sizing: SizingOptions, options: "PlanOptions") -> None:
    """Start an engine for each format, and exit with code 1 if memory is off by more than the tolerance."""
    from kvq.models.loading.prepared import prepare

    if wrong := sorted(spelled for name, spelled in given_options().items() if name not in _ALLOWED):
        raise ConfigError(f"--verify measures this machine; leave out {', '.join(wrong)}")
    if sizing.model.lower() in known_models():
        raise ConfigError(
            f"--verify starts the model, and of {sizing.model} only the shape is known; give its folder "
            f"(./{sizing.model}) or its hub name"
        )
    prepared = prepare(sizing.model, **picked(sizing, "block_size", "max_context", "weights"))
    engine = _engine(sizing, options)
    for kv in formats:
        prepared.check_scales(prepared.recipe(kv))
    say_model(prepared.source, prepared.digest)
    rows: list[dict[str, Any]] = []
    with FinishedRows(sizing.json_path, result_of, lambda result: _print(result["rows"])) as finished:
        for kv in formats:
            rows.append(_verify(prepared, kv, engine, sizing.weights))
            finished.keep(rows.copy)
        finished.end(rows)
    if not all(row["holds"] for row in rows):
        sys.exit(1)


def _engine(sizing: SizingOptions, options: "PlanOptions") -> "EngineConfig":
    """Return the engine's settings; without --gpu-memory-utilization, the engine's own limit applies."""
    from kvq.engine.config import EngineConfig

    has_share = "memory_fraction" in given_options()
    return EngineConfig(
        kv_memory=options.kv_memory,
        max_context=sizing.max_context,
        max_num_batched_tokens=options.step_tokens,
        memory_fraction=sizing.memory_fraction if has_share else None,
        max_num_seqs=sizing.sequences or MAX_NUM_SEQS,
    )


def _verify(prepared: "PreparedModel", kv: str, engine: "EngineConfig", weights: str) -> dict[str, Any]:
    """Plan and start an engine, and compare the two; `wrong` lists the terms that are off."""
    from kvq.engine import LLM
    from kvq.engine.steps.reconcile import WHOLE_TOLERANCE

    gc.collect()  # an earlier engine in reference cycles would be freed during the comparison
    planned = _planned_pool(prepared, kv, engine)
    settings = {name: value for name, value in asdict(engine).items() if value is not None}
    with (
        status(f"starting an engine with KV in {kv}"),
        LLM(prepared.source, kv, block_size=prepared.block_size, weights=weights, **settings) as llm,
    ):
        *lines, pool = llm.core.memory.lines
        whole = llm.core.memory.whole
    lines.append(replace(pool, planned=planned))
    wrong = [line.name for line in lines if line.is_wrong]
    if abs(whole.off) > WHOLE_TOLERANCE:  # beyond variations in the memory of libraries
        wrong.append(whole.name)
    terms = [
        {"name": line.name, "planned_bytes": line.planned, "found_bytes": line.found, "off": line.off}
        for line in (*lines, whole)
    ]
    return {"kv": kv, "device": prepared.device.type, "holds": not wrong, "wrong": wrong, "terms": terms}


def _planned_pool(prepared: "PreparedModel", kv: str, engine: "EngineConfig") -> int:
    """Return the size in bytes of the pools that an engine would get from the currently free memory."""
    from kvq.cache.memory import available_bytes
    from kvq.engine.device.memory import planned_pools
    from kvq.models.loading.footprint import planned_activations, planned_weights

    layout = prepared.layout(prepared.recipe(kv))
    free = available_bytes(prepared.device)
    weights = sum(term.nbytes for term in planned_weights(prepared))
    pools = planned_pools(
        layout,
        engine,
        on_gpu=prepared.device.type == "cuda",
        max_context=min(engine.max_context or prepared.max_context, prepared.max_context),
        free_bytes=None if free is None else free - weights,
        activation_bytes=planned_activations(prepared, engine.max_num_batched_tokens).nbytes,
    )
    return bytes_of(layout, pools.num_blocks)


def _print(rows: list[dict[str, Any]]) -> None:
    from kvq.engine.steps.reconcile import SMALL, TOLERANCE, WHOLE_TOLERANCE

    terms = [{"kv": row["kv"], **term} for row in rows for term in row["terms"]]
    print_columns(terms, columns_of("plan --verify"))
    if names := dict.fromkeys(name for row in rows for name in row["wrong"]):
        echo(
            f"kvq: memory is off the plan: {' and '.join(names)} (a term above {decimal(SMALL)} by more than "
            f"{TOLERANCE:.0%}, or the whole process by more than {WHOLE_TOLERANCE:.0%})",
            err=True,
        )
