"""Engine construction: turns a model and options into the parts of an engine, sized for its device."""

import logging
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvq.blockmgr import BlockManager
from kvq.cache.cold import ColdCodec
from kvq.cache.memory import available_bytes
from kvq.engine.config import EngineConfig
from kvq.engine.device.dry_run import dry_run
from kvq.engine.device.memory import describe_pools, planned_pools
from kvq.engine.device.runner import Runner
from kvq.engine.kv_guard import check_guard
from kvq.engine.requests.marking import read_marking
from kvq.engine.speculation.make import Helper, check_speculation, helper_bytes_per_token
from kvq.engine.speculation_config import parse_speculation
from kvq.engine.tiering import build_tiers, engine_identity, ladder_of, rungs_of, tier_rungs
from kvq.errors import ConfigError, nearest
from kvq.formats import KVRecipe, StaticScales
from kvq.layout import Holding, KVLayout
from kvq.models import Model
from kvq.models.check.load_check import check_on_load, refuse_known
from kvq.models.describe.resolve import ModelSource
from kvq.models.loading.prepared import LoadOptions, PreparedModel, find_scales, prepare
from kvq.models.model import load_prepared
from kvq.models.mtp import MtpHead
from kvq.scheduler import MeasuredCosts, Scheduler, SchedulerConfig
from kvq.sizes import decimal
from kvq.sizing.needs import bytes_of
from kvq.sizing.pools import PoolPlan, reserve_blocks, rung_bytes

_log = logging.getLogger("kvq")
_ENGINE_OPTIONS = tuple(field.name for field in fields(EngineConfig))
_POOLED = {"max_num_seqs", "max_num_batched_tokens", "max_context"}  # options that the pools may reduce
_GOALS = {field.name for field in fields(SchedulerConfig)} & set(_ENGINE_OPTIONS) - _POOLED
_SUCCESSORS = {  # D406: of options that are gone
    "swap_memory": "; give kv_host, such as '8GiB';",
    "swap_folder": "; give kv_disk, such as '100GiB', and kv_dir;",
}
_LIVE_FLOATS = 6  # approximate live values per token and hidden dimension within a layer
_LOAD_OPTIONS = ("scales", *LoadOptions.__annotations__)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedEngine:
    """Engine configuration that passed all checks; weights are not loaded yet. Made by `check_engine`."""

    model: PreparedModel
    recipe: KVRecipe
    scales: StaticScales | None
    config: EngineConfig

    @property
    def layout(self) -> KVLayout:
        """Block layout for the recipe."""
        return self.model.layout(self.recipe)

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights in memory."""
        model = self.model
        return model.stored_bytes if model.is_quantized else model.dtype.itemsize * model.stored_values

    @property
    def taken_bytes(self) -> int:
        """Approximate bytes of the weights and a step's activations, which must fit in free memory."""
        live_values = self.config.max_num_batched_tokens * self.model.geometry.hidden_size * _LIVE_FLOATS
        return self.weights_bytes + live_values * self.model.dtype.itemsize

    def pools(self, free_bytes: int | None, activation_bytes: int) -> PoolPlan:
        """Return the pool sizes. The arguments and errors are those of `planned_pools`."""
        return planned_pools(
            self.layout,
            self.config,
            on_gpu=self.model.device.type == "cuda",
            max_context=self.model.max_context,
            free_bytes=free_bytes,
            activation_bytes=activation_bytes,
        )

    def load(self) -> Model:
        """Load the weights.

        Raises:
            ModelError: the weights are damaged, or the model would run incorrectly.
        """
        return load_prepared(self.model, self.recipe, self.scales)


def check_cache(model: PreparedModel) -> None:
    """Raise ConfigError if a model was prepared with a cache that an engine can't use."""
    if model.cache != "kvq":
        raise ConfigError(f"the engine runs over kvq's own cache, not {model.cache!r}; leave cache out")


def check_engine(
    model: str | Path | ModelSource, kv: str | KVRecipe, options: dict[str, Any]
) -> CheckedEngine:
    """Check an engine's model and options. The options are those of `EngineConfig` and `kvq.load`.

    Raises:
        ModelError: the model is missing, damaged or refused.
        ConfigError: an option is unknown or out of range, or formats or scales can't be used.
        UnsupportedKernel: no kernel on this machine runs the formats.
        OutOfMemory: not even one block fits into `kv_memory`.
    """
    _check_known(options, {*_ENGINE_OPTIONS, *_LOAD_OPTIONS}, "known:")
    config = EngineConfig(**{name: value for name, value in options.items() if name in _ENGINE_OPTIONS})
    read_marking(config.watermark, config.watermark_scheme, config.watermark_key_file)
    rest = {name: value for name, value in options.items() if name not in _ENGINE_OPTIONS}
    path = rest.pop("scales", None)
    prepared = prepare(model, max_context=config.max_context, **rest)
    check_cache(prepared)
    check_speculation(parse_speculation(config.speculation), prepared)
    scales = find_scales(prepared, path)
    recipe = prepared.recipe(kv, scales)
    prepared.check_scales(recipe)
    prepared.check_kernels(recipe)
    if config.guard:
        check_guard(recipe, config)
    checked = CheckedEngine(model=prepared, recipe=recipe, scales=scales, config=config)
    checked.pools(None, 0)
    return checked


def build(
    model: str | Path | ModelSource | Model, kv: str | KVRecipe, options: dict[str, Any]
) -> tuple[Model, EngineConfig]:
    """Load the model if it isn't loaded yet, and return it with the engine's configuration.

    Raises:
        ModelError: the model is missing, damaged or refused.
        ConfigError: an option can't be used, or options of `load` are given for a loaded model.
        BrokenFormat: the format breaks the newly loaded model, and `accept_divergence` is not set.
        UnsupportedKernel: no kernel on this machine runs the formats.
        OutOfMemory: not even one block fits into `kv_memory`.
    """
    if not isinstance(model, Model):
        checked = check_engine(model, kv, options)
        refuse_known(checked.model, checked.recipe, accept_divergence=checked.config.accept_divergence)
        loaded = checked.load()
        check_on_load(loaded, accept_divergence=checked.config.accept_divergence)
        return loaded, checked.config
    _check_known(options, {*_ENGINE_OPTIONS}, "an engine over a loaded model takes")
    return model if kv == "auto" else model.with_kv(kv), EngineConfig(**options)


def _check_known(options: dict[str, Any], known: set[str], what: str) -> None:
    for name in sorted(options.keys() - known):
        hint = _SUCCESSORS.get(name) or nearest(name, sorted(known)) or ";"
        raise ConfigError(f"unknown option {name!r}{hint} {what} {sorted(known)}")


def build_parts(
    model: Model, config: EngineConfig, max_context: int, helper: Helper
) -> tuple[Scheduler, Runner]:
    """Measure a full-size step on a small pool, then create the real pools, the scheduler and the runner.

    A drafting helper gets a pool for the same number of tokens, allocated from the same free memory.
    """
    layout, device = model.layout, model.weights.device
    costs, activation_bytes = MeasuredCosts(), 0
    if config.num_blocks is None and config.kv_memory is None:
        _log.info("measuring a step of %d tokens", config.max_num_batched_tokens)
        tried = dry_run(model, max_num_batched_tokens=config.max_num_batched_tokens, max_context=max_context)
        costs, activation_bytes = MeasuredCosts(prefill_token_s=tried.token_s), tried.activation_bytes
    own, free = layout.kv_bytes_per_token, available_bytes(device)
    if free is not None:
        free = round(free * own / (own + helper_bytes_per_token(helper)))
    pools = planned_pools(
        layout,
        config,
        on_gpu=device.type == "cuda",
        max_context=max_context,
        free_bytes=free,
        activation_bytes=activation_bytes,
    )
    num_blocks = pools.num_blocks
    _log_pools(pools, config, layout, max_context)
    rungs = rungs_of(config, model)
    sizes, below = rung_bytes(rungs[: 1 + len(ladder_of(config))]), tier_rungs(config, rungs)
    tiers = build_tiers(config, model, rungs, bytes_of(layout, num_blocks))
    runner = Runner(model, pools, max_context, keeps_hidden=isinstance(helper, MtpHead))
    runner.cache.tiers = tiers
    if rungs:
        runner.cache.codec = ColdCodec(runner.cache, rungs[0], rungs[1:], model.prepared.backend)
    more = Holding(snapshot_every=config.snapshot_every, rungs=sizes)
    manager = BlockManager(
        num_blocks=num_blocks,
        block_size=layout.block_size,
        **(layout.holding | more),
        identity=engine_identity(model, rungs) if model.prepared.exact or config.kv_dir is not None else b"",
        reserve_blocks=reserve_blocks(num_blocks, config.reserve_fraction),
    )
    manager.blocks.tiers, manager.blocks.tier_rungs = tiers, below
    if config.kv_cold_share < 1:
        manager.blocks.cold_share, manager.misses.refuses = config.kv_cold_share, manager.below.is_too_cold
    if tiers is not None:
        tiers.on_aged = lambda key: manager.misses.lose([key.digest], "too_old")
    scheduler = Scheduler(
        manager,
        SchedulerConfig(
            max_num_seqs=pools.sequences,
            max_num_batched_tokens=pools.chunk,
            max_context=max_context,
            **{name: getattr(config, name) for name in _GOALS},
        ),
        costs,
    )
    return scheduler, runner


def _log_pools(pools: PoolPlan, config: EngineConfig, layout: KVLayout, max_context: int) -> None:
    if pools.step_tokens < config.max_num_batched_tokens:
        _log.info("steps take %d tokens at most, since they wait in the staging area", pools.step_tokens)
    if pools.sequences < config.max_num_seqs:
        _log.info("%d sequences run at once at most, since a step has a token for each", pools.sequences)
    _log.info("making the KV pool, %s", decimal(bytes_of(layout, pools.num_blocks)))
    fitting = describe_pools(layout, pools, max_context)
    _log.info("requests that fit at once, and what they run out of first: %s", fitting)
