"""Memory of several models: `python -m kvq.server.models.planning`, which needs torch; the server does not.

The process reads models from its standard input and writes their plans, both as JSON.
"""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from kvq.errors import ConfigError, EngineError, KVQError
from kvq.server.assembly import describe_engine
from kvq.server.engine.messages import Start
from kvq.server.models.config import HostedModel
from kvq.sizes import binary, parse_bytes
from kvq.sizing.shares import EngineNeed, divide_memory

_USER_TOKENS = 4096  # context of a user for whom memory is divided
_HOST_PROCESS = 400 << 20  # bytes of an engine's process without tensors: interpreter, libraries, buffers
_GPU_PROCESS = 600_000_000  # of it on a GPU: the CUDA context and kernels; as `kvq plan` has it
_SIZED = ("kv_memory", "num_blocks")  # options that give the size of the KV pool


class _Model(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    memory: str | float | None
    start: Start


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a model's engine, in bytes."""

    name: str
    weights_bytes: int
    kv_bytes: int
    total_bytes: int  # with activations and the process

    def __str__(self) -> str:
        return (
            f"{binary(self.total_bytes)} for {self.name}: weights {binary(self.weights_bytes)}, KV "
            f"{binary(self.kv_bytes)}, the rest for activations and the process"
        )


class _Plans(msgspec.Struct, frozen=True, kw_only=True):
    plans: list[MemoryPlan] = []
    refusal: str | None = None


def plan_memory(models: Sequence[HostedModel]) -> list[MemoryPlan]:
    """Return the memory of each model, from its files, its options and the device's free memory.

    Raises:
        KVQError: a model or an option can't be used, or the models don't fit in memory together.
    """
    return _plan([_model(one) for one in models])


def plan_apart(models: Sequence[HostedModel]) -> list[MemoryPlan]:
    """Return what `plan_memory` returns, computed in a process that ends with it.

    Raises:
        ConfigError: as `plan_memory`. EngineError: the process failed.
    """
    given = msgspec.json.encode([_model(one) for one in models])
    command = [sys.executable, "-P", "-m", __name__]
    found = subprocess.run(command, input=given, stdout=subprocess.PIPE, check=False)
    if found.returncode:
        raise EngineError(f"the memory of the models can't be planned: status {found.returncode}")
    plans = msgspec.json.decode(found.stdout, type=_Plans)
    if plans.refusal is not None:
        raise ConfigError(plans.refusal)
    return plans.plans


def with_memory(one: HostedModel, plan: MemoryPlan) -> HostedModel:
    """Return a model with the planned size of its KV pool among its options."""
    if any(name in one.config.engine for name in _SIZED):
        return one
    engine = one.config.engine | {"kv_memory": plan.kv_bytes}
    return replace(one, config=replace(one.config, engine=engine))


def _model(one: HostedModel) -> _Model:
    options, name = one.config.engine, one.entry.name
    if "memory_fraction" in options:
        raise ConfigError(
            f"{name}: memory_fraction is of what is free when an engine starts, which the other models "
            "change; give memory, such as 0.4 or 8GiB, or kv-memory"
        )
    if one.entry.memory is not None and (sized := [option for option in _SIZED if option in options]):
        raise ConfigError(f"{name}: memory and {sized[0]} both size the KV pool; give one of them")
    return _Model(name=name, memory=one.entry.memory, start=describe_engine(one.config)[1])


def _plan(models: Sequence[_Model]) -> list[MemoryPlan]:
    from kvq.cache.memory import available_bytes

    needs, weights, on_gpu, free = list[EngineNeed](), list[int](), False, 0
    for one in models:
        need, weights_bytes, device = _need(one)
        on_gpu = device.type == "cuda"
        free = available_bytes(device) or 0
        if one.memory is not None:
            total = parse_bytes(one.memory, "memory") if isinstance(one.memory, str) else free * one.memory
            need = replace(need, total_bytes=int(total))
        needs.append(need)
        weights.append(weights_bytes)
    return [
        MemoryPlan(
            name=need.name, weights_bytes=own, kv_bytes=kv_bytes, total_bytes=need.fixed_bytes + kv_bytes
        )
        for need, own, kv_bytes in zip(needs, weights, divide_memory(needs, free, on_gpu=on_gpu), strict=True)
    ]


def _need(one: _Model) -> tuple[EngineNeed, int, Any]:
    """Return what a model's engine takes, the bytes of its weights, and its device."""
    from kvq.engine.build import check_engine
    from kvq.sizing.needs import bytes_of

    options = {name: value for name, value in one.start.options.items() if name not in _SIZED}
    engine = check_engine(Path(one.start.folder), one.start.kv, options)
    given = None
    if options != one.start.options:
        sized = check_engine(Path(one.start.folder), one.start.kv, one.start.options)
        given = bytes_of(sized.layout, sized.pools(None, 0).num_blocks)
    model, layout = engine.model, engine.layout
    process = _GPU_PROCESS if model.device.type == "cuda" else _HOST_PROCESS
    need = EngineNeed(
        name=one.name,
        fixed_bytes=engine.taken_bytes + process,
        user_bytes=layout.sequence_bytes(min(_USER_TOKENS, model.max_context)),
        most_bytes=bytes_of(layout, engine.pools(None, 0).num_blocks),
        kv_bytes=given,
    )
    return need, engine.weights_bytes, model.device


def main() -> None:
    """Plan the models in standard input."""
    models = msgspec.json.decode(sys.stdin.buffer.read(), type=list[_Model])
    try:
        found = _Plans(plans=_plan(models))
    except KVQError as error:
        found = _Plans(refusal=str(error))
    sys.stdout.buffer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
