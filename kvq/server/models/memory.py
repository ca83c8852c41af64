"""Memory of each model: planned in a process that loads torch for it, and ends before the engines start."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from kvq.errors import ConfigError, EngineError
from kvq.server.assembly import describe_engine
from kvq.server.engine.messages import Start
from kvq.server.models.config import HostedModel
from kvq.sizes import binary

_SIZED = ("kv_memory", "num_blocks")  # options that give the size of the KV pool


class PlannedModel(msgspec.Struct, frozen=True, kw_only=True):
    """Model whose memory is to be planned."""

    name: str
    memory: str | float | None  # size or share of the free memory, for everything together
    start: Start

    def without_size(self) -> dict[str, object]:
        """Return the engine's options without the size of its pool."""
        return {name: value for name, value in self.start.options.items() if name not in _SIZED}


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

    def applied(self, one: HostedModel) -> HostedModel:
        """Return the model with the size of its KV pool among its options, if they don't have it yet."""
        if any(name in one.config.engine for name in _SIZED):
            return one
        engine = one.config.engine | {"kv_memory": self.kv_bytes}
        return replace(one, config=replace(one.config, engine=engine))


class MemoryPlans(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of the planning process."""

    plans: list[MemoryPlan] = []
    refusal: str | None = None


def to_plan(one: HostedModel) -> PlannedModel:
    """Return what planning needs to know about a model. Raises KVQError if options exclude each other."""
    options, name = one.config.engine, one.entry.name
    if "memory_fraction" in options:
        raise ConfigError(
            f"{name}: memory_fraction is of what is free when an engine starts, which the other models "
            "change; give memory, such as 0.4 or 8GiB, or kv-memory"
        )
    if one.entry.memory is not None and (sized := [option for option in _SIZED if option in options]):
        raise ConfigError(f"{name}: memory and {sized[0]} both size the KV pool; give one of them")
    return PlannedModel(name=name, memory=one.entry.memory, start=describe_engine(one.config)[1])


def plan_apart(models: Sequence[HostedModel]) -> list[MemoryPlan]:
    """Return the memory of each model, as `kvq.server.models.planning.plan_memory` computes it.

    Raises:
        KVQError: a model or an option can't be used, or the models don't fit in memory together.
    """
    given = msgspec.json.encode([to_plan(one) for one in models])
    command = [sys.executable, "-P", "-m", "kvq.server.models.planning"]
    # An interrupt at the terminal reaches only the parent
    found = subprocess.run(command, input=given, stdout=subprocess.PIPE, check=False, process_group=0)
    if found.returncode:
        raise EngineError(f"the memory of the models can't be planned: status {found.returncode}")
    plans = msgspec.json.decode(found.stdout, type=MemoryPlans)
    if plans.refusal is not None:
        raise ConfigError(plans.refusal)
    return plans.plans
