"""`kvq plan --verify`: start engines here, and compare their memory with the plan."""

import gc
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvq.commands.results import result_of
from kvq.commands.screen import echo
from kvq.commands.sizing import SizingOptions, given_options
from kvq.errors import ConfigError
from kvq.sizes import decimal
from kvq.sizing.pools import MAX_NUM_SEQS

if TYPE_CHECKING:
    from kvq.commands.plan import Asked
    from kvq.engine.config import EngineConfig
    from kvq.engine.reconcile import Line
    from kvq.models.prepared import PreparedModel

_ALLOWED = {
    *("model", "kv", "verify", "kv_memory", "json_path", "block_size", "weights", "max_num_seqs"),
    *("max_num_batched_tokens", "max_model_len", "gpu_memory_utilization"),
}


@dataclass(frozen=True, slots=True)
class _Found:
    """What one engine was planned to take, and takes."""

    kv: str
    device: str
    lines: tuple["Line", ...]
    whole: "Line"

    @property
    def wrong(self) -> list[str]:
        """Terms that are off, and the process where more is than what libraries come and go with."""
        from kvq.engine.reconcile import WHOLE_TOLERANCE

        names = [line.name for line in self.lines if line.is_wrong]
        return names + ([self.whole.name] if abs(self.whole.off) > WHOLE_TOLERANCE else [])

    def row(self) -> dict[str, Any]:
        """As JSON."""
        terms = [
            {"name": line.name, "planned_bytes": line.planned, "found_bytes": line.found, "off": line.off}
            for line in (*self.lines, self.whole)
        ]
        return {"kv": self.kv, "device": self.device, "holds": not self.wrong, "terms": terms}


def run(formats: list[str], sizing: SizingOptions, asked: "Asked") -> None:
    """Start one engine a format; exit code 1 if any term is off by more than the tolerance."""
    from kvq.capacity.plan.known import known_models
    from kvq.commands.finished import FinishedRows
    from kvq.commands.loading import say_model
    from kvq.models.prepared import prepare

    if wrong := sorted(given_options() - _ALLOWED):
        names = ", ".join("--" + name.replace("_", "-") for name in wrong)
        raise ConfigError(f"--verify measures this machine; leave out {names}")
    if sizing.model.lower() in known_models():
        raise ConfigError(
            f"--verify starts the model, and of {sizing.model} only the shape is known; give its folder "
            f"(./{sizing.model}) or its hub name"
        )
    prepared = prepare(
        sizing.model,
        block_size=sizing.block_size,
        max_context=sizing.max_model_len,
        weights=sizing.weights,
    )
    engine = _engine(sizing, asked)
    for kv in formats:
        prepared.check_scales(prepared.recipe(kv))
    say_model(prepared.source, prepared.digest)
    found: list[_Found] = []

    def result(rows: Sequence[_Found]) -> dict[str, Any]:
        return result_of([one.row() for one in rows])

    with FinishedRows(sizing.json_path, result, lambda _: _print(found)) as finished:
        for kv in formats:
            found.append(_verify(prepared, kv, engine, sizing.weights))
            finished.keep(found.copy)
        finished.end(found)
    if any(one.wrong for one in found):
        sys.exit(1)


def _engine(sizing: SizingOptions, asked: "Asked") -> "EngineConfig":
    """The settings that were given; without a share of memory a host's own bound holds."""
    from kvq.engine.config import EngineConfig

    has_share = "gpu_memory_utilization" in given_options()
    return EngineConfig(
        kv_memory=asked.kv_memory,
        max_context=sizing.max_model_len,
        max_num_batched_tokens=asked.max_num_batched_tokens,
        memory_fraction=sizing.gpu_memory_utilization if has_share else None,
        max_num_seqs=sizing.max_num_seqs or MAX_NUM_SEQS,
    )


def _verify(prepared: "PreparedModel", kv: str, engine: "EngineConfig", weights: str) -> _Found:
    """Plan an engine, start it, and look."""
    from kvq.commands.progress import status
    from kvq.engine import LLM
    from kvq.engine.reconcile import Line

    gc.collect()  # an engine that was before may lie in cycles, and go while this one is looked at
    planned = _planned_pool(prepared, kv, engine)
    settings = {name: value for name, value in asdict(engine).items() if value is not None}
    with (
        status(f"starting an engine with KV in {kv}"),
        LLM(prepared.source, kv, block_size=prepared.block_size, weights=weights, **settings) as llm,
    ):
        memory = llm.core.memory
        pool = Line("KV pool", planned, memory.lines[-1].found)
        return _Found(kv, prepared.device.type, (*memory.lines[:-1], pool), memory.whole)


def _planned_pool(prepared: "PreparedModel", kv: str, engine: "EngineConfig") -> int:
    """Bytes of the pools of an engine that is yet to be started, from what is free now."""
    from kvq.cache.memory import available_bytes
    from kvq.engine.memory import planned_blocks
    from kvq.models.footprint import planned_activations, planned_weights
    from kvq.sizing.pools import bytes_of

    layout = prepared.layout(prepared.recipe(kv))
    free = available_bytes(prepared.device)
    weights = sum(term.nbytes for term in planned_weights(prepared))
    blocks = planned_blocks(
        layout,
        engine,
        on_gpu=prepared.device.type == "cuda",
        max_context=min(engine.max_context or prepared.max_context, prepared.max_context),
        free_bytes=None if free is None else free - weights,
        activation_bytes=planned_activations(prepared, engine.max_num_batched_tokens).nbytes,
    )
    return bytes_of(layout, blocks)


def _print(found: list[_Found]) -> None:
    from kvq.commands.tables import console, new_table
    from kvq.engine.reconcile import SMALL, TOLERANCE, WHOLE_TOLERANCE

    table = new_table(("KV", "", "planned", "found", "off"), ("KV", ""), no_wrap=False)
    for one in found:
        for line in (*one.lines, one.whole):
            planned, there = decimal(line.planned), decimal(line.found)
            table.add_row(one.kv, line.name, planned, there, f"{line.off:+.2%}")
    console().print(table)
    if names := dict.fromkeys(name for one in found for name in one.wrong):
        echo(
            f"kvq: memory is off the plan: {' and '.join(names)} (a term above {decimal(SMALL)} by more than "
            f"{TOLERANCE:.0%}, or the whole process by more than {WHOLE_TOLERANCE:.0%})",
            err=True,
        )
