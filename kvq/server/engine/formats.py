"""Engines of one process over the same weights: one for each KV format that requests may have."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from kvq.engine.config import EngineConfig
from kvq.engine.steps.core import EngineCore
from kvq.errors import ConfigError
from kvq.formats import KVRecipe, StaticScales
from kvq.models import Model
from kvq.models.check.load_check import check_on_load
from kvq.models.loading.prepared import PreparedModel
from kvq.server.engine.messages import Start
from kvq.sizing.needs import bytes_of

# What only the engine of the default format has: tiers, hand-overs, the guard and drafts
_OWN = tuple(
    one for one in fields(EngineConfig) if one.name.startswith(("kv_", "hand_over_", "guard", "speculation"))
)


def other_recipes(
    model: PreparedModel, recipe: KVRecipe, also: Sequence[str], scales: StaticScales | None
) -> dict[str, KVRecipe]:
    """Return the recipes of the other formats by name.

    Raises:
        ConfigError: a format doesn't fit the model, or two names mean the same.
        UnsupportedKernel: no kernel on this machine runs a format.
    """
    found = {recipe.name: recipe}
    for name in also:
        other = model.recipe(name, scales)
        model.check_scales(other)
        model.check_kernels(other)
        key = other.layers, other.exact
        if same := [one for one, known in found.items() if (known.layers, known.exact) == key]:
            raise ConfigError(f"--kv-also {name} is the same format as {same[0]}; leave it out")
        found[name] = other
    return {name: found[name] for name in also}


def make_cores(model: Model, config: EngineConfig, start: Start) -> dict[str, EngineCore]:  # D413
    """Return the engines by the names of their formats, the default's first; each has its own pools.

    The other formats' pools get `start.kv_also_share` of the memory each, and the default's the rest.

    Raises:
        ConfigError: a format doesn't fit the model.
        BrokenFormat: a format breaks the model, and `accept_divergence` is not set.
        OutOfMemory: the pools don't fit in memory.
    """
    if not start.kv_also:
        return {start.kv: EngineCore(model, config)}
    left = 1 - start.kv_also_share * len(start.kv_also)
    core = EngineCore(model, replace(config, kv_share=left))
    cores = {start.kv: core}
    changed: dict[str, Any] = {one.name: one.default for one in _OWN} | {"kv_memory": config.kv_memory}
    if config.num_blocks is None and config.kv_memory is None:
        pools = bytes_of(model.layout, core.scheduler.shape.num_blocks)
        changed["kv_memory"] = round(pools / left)
    changed |= {"kv_share": start.kv_also_share, "adapters": {}}  # the default's serve all
    plain = replace(config, **changed)
    for name, recipe in other_recipes(
        model.prepared, model.recipe, start.kv_also, model.static_scales
    ).items():
        other = model.with_kv(recipe)
        check_on_load(other, accept_divergence=config.accept_divergence)
        cores[name] = EngineCore(other, plain)
        core.adapters.serve(cores[name])
    return cores
