"""Planning of several models' memory: `python -m kvq.server.models.planning`, from JSON to JSON."""

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvq.cache.memory import available_bytes
from kvq.engine.build import CheckedEngine, check_engine
from kvq.errors import KVQError
from kvq.server.models.config import HostedModel
from kvq.server.models.memory import MemoryPlan, MemoryPlans, PlannedModel, to_plan
from kvq.sizes import parse_bytes
from kvq.sizing.needs import bytes_of
from kvq.sizing.shares import EngineNeed, divide_memory

_USER_TOKENS = 4096  # context of the users for whom memory is divided
_HOST_PROCESS = 320 << 20  # bytes of an engine's process without tensors: interpreter, libraries, buffers
_GPU_PROCESS = 600_000_000  # of it on a GPU: the CUDA context and kernels; as `kvq plan` has it


def plan_memory(models: Sequence[HostedModel]) -> list[MemoryPlan]:
    """Return the memory of each model, from its files, its options and the free memory of its device.

    Raises:
        KVQError: a model or an option can't be used, or the models don't fit in memory together.
    """
    return _plan([to_plan(one) for one in models])


def _plan(models: Sequence[PlannedModel]) -> list[MemoryPlan]:
    engines = {one.name: check_engine(_folder(one), one.start.kv, one.without_size()) for one in models}
    needs = [_need(one, engines[one.name]) for one in models]
    kv_bytes: dict[str, int] = {}
    for device in {engine.model.device for engine in engines.values()}:
        own = [need for need in needs if engines[need.name].model.device == device]
        found = divide_memory(own, available_bytes(device) or 0, on_gpu=device.type == "cuda")
        kv_bytes |= zip((need.name for need in own), found, strict=True)
    return [
        MemoryPlan(
            name=need.name,
            weights_bytes=engines[need.name].weights_bytes,
            kv_bytes=kv_bytes[need.name],
            total_bytes=need.fixed_bytes + kv_bytes[need.name],
        )
        for need in needs
    ]


def _need(one: PlannedModel, engine: CheckedEngine) -> EngineNeed:
    """Return what a model takes. `engine`: the model's, with a pool of any size."""
    model, total = engine.model, one.memory
    if isinstance(total, float):
        total = int(total * (available_bytes(model.device) or 0))
    is_sized = one.without_size() != one.start.options
    return EngineNeed(
        name=one.name,
        fixed_bytes=engine.taken_bytes + (_GPU_PROCESS if model.device.type == "cuda" else _HOST_PROCESS),
        user_bytes=engine.layout.sequence_bytes(min(_USER_TOKENS, model.max_context)),
        most_bytes=_pool_bytes(engine),
        kv_bytes=_pool_bytes(check_engine(_folder(one), one.start.kv, one.start.options))
        if is_sized
        else None,
        total_bytes=None if total is None else parse_bytes(total, f"memory of {one.name}"),
    )


def _folder(one: PlannedModel) -> Path:
    return Path(one.start.folder)


def _pool_bytes(engine: CheckedEngine) -> int:
    """Return the bytes of an engine's pool, or those that it can use if no option gives its size."""
    return bytes_of(engine.layout, engine.pools(None, 0).num_blocks)


def main() -> None:
    """Plan the models that standard input describes."""
    models = msgspec.json.decode(sys.stdin.buffer.read(), type=list[PlannedModel])
    try:
        found = MemoryPlans(plans=_plan(models))
    except KVQError as error:
        found = MemoryPlans(refusal=str(error))
    sys.stdout.buffer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
