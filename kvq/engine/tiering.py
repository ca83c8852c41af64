"""Tiers of an engine: built from its options, and filled with blocks that are still in the pools."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq.blockmgr import BlockManager
from kvq.cache.blocks import BlockCache
from kvq.engine.config import EngineConfig
from kvq.engine.exactness import engine_facts
from kvq.engine.handover import make_hand_over
from kvq.engine.kv_guard import Guard, make_guard
from kvq.engine.requests.sessions import Sessions
from kvq.errors import ConfigError
from kvq.layout import KVLayout, plan_layout
from kvq.models import Model
from kvq.scheduler import Branch, Scheduler
from kvq.sizes import binary, parse_bytes
from kvq.sizing.pools import BESIDE, rung_bytes
from kvq.tiers.disk import DiskTier
from kvq.tiers.folder import Folder
from kvq.tiers.sealing import Sealing, keyed_sealing
from kvq.tiers.tiers import Tiers

if TYPE_CHECKING:
    from kvq.engine.handover.handover import HandOver

_log = logging.getLogger("kvq")
_SHARE = 0.05  # of the time of steps, for saving blocks while requests run
_PIECE_S = 0.02  # when idle: a new request waits this long at most
_EXPIRE_S = 1.0  # when idle, from look to look for blocks that are too old
_FULL_S = 0.005  # until the queue of a slow disk is looked at again


def engine_identity(model: Model, rungs: list[KVLayout]) -> bytes:
    """Return the digest's input that tells an engine's prefixes from those of other models and recipes.

    Engines that promise exactness also tell programs apart. `rungs`: of the ladder.
    """
    facts = engine_facts(model)
    if rungs:
        facts["ladder"] = " ".join(rung.recipe.digest() for rung in rungs)
    if not model.prepared.exact:
        del facts["program"]
    return repr(facts).encode()


def _size_of(layout: KVLayout, rungs: list[KVLayout], group: int, rung: int) -> int:
    """Return the bytes of a stored block, or -1 if a layer group has no such rung."""
    layouts = [layout, *rungs[1:]]
    groups = layouts[rung].groups if rung < len(layouts) else ()
    return groups[group].block_bytes if group < len(groups) else -1


def build_tiers(config: EngineConfig, model: Model, rungs: list[KVLayout], pool_bytes: int) -> Tiers | None:
    """Return the tiers that an engine's options ask for, or None.

    A ladder alone gets some host memory for the layer groups without rungs: recent tokens, windows, states.

    Raises:
        ConfigError: the folder or the key can't be used, or a budget is too small.
    """
    host, disk = parse_bytes(config.kv_host, "kv_host"), parse_bytes(config.kv_disk, "kv_disk")
    groups = None
    if rungs and not host and not disk:  # what has no rungs would be lost, and with it the use of the rest
        host, groups = pool_bytes // BESIDE, {*range(len(model.layout.groups))} - rung_bytes(rungs).keys()
    if not host and not disk:
        return None
    age, share, files = config.kv_max_age_s, config.kv_tenant_share, None
    if config.kv_dir is not None:
        largest = max(group.block_bytes for group in model.layout.groups)
        folder = Folder(Path(config.kv_dir), disk, largest, max_age_s=age)
        sealing = Sealing() if config.kv_key_file is None else keyed_sealing(config.kv_key_file)
        facts = {
            "model": model.prepared.digest,
            "kv": model.recipe.name[:64],
            "recipe": model.recipe.digest(),
        }
        sizes = partial(_size_of, model.layout, rungs)
        files = DiskTier(folder, sealing, facts, sizes=sizes, tenant_share=share)
        _log.info("KV on disk: %d blocks, %s in %s", len(files), binary(files.nbytes), folder.path)
    return Tiers(host, files, groups=groups, max_age_s=age, tenant_share=share)


def ladder_of(config: EngineConfig) -> list[str]:
    """Return the formats of a ladder, in their order."""
    names = config.kv_ladder.split(",") if isinstance(config.kv_ladder, str) else config.kv_ladder
    return [name.strip() for name in names if name.strip()]


def rungs_of(config: EngineConfig, model: Model) -> list[KVLayout]:
    """Return the layouts in which blocks may be stored: the model's own, a ladder's, and that of the tiers.

    Empty if there is only the model's own.

    Raises:
        ConfigError: a format is unknown or doesn't fit, or the engine promises exactness, which fewer bits
            can't keep.
    """
    names, below = ladder_of(config), config.kv_tier_format
    given = [*names, below] if below is not None and below not in names else names
    if not given:
        return []
    if model.prepared.exact:
        option = "kv_ladder" if names else "kv_tier_format"
        raise ConfigError(f"exact and {option} exclude each other: fewer bits change blocks; leave one out")
    size, order = model.layout.block_size, model.prepared.order
    plan = partial(plan_layout, model.geometry, block_size=size, order=order, staging=False)
    recipes = map(model.prepared.recipe, given)
    whole = (replace(one, layers=tuple(layer.unclipped() for layer in one.layers)) for one in recipes)
    return [plan(model.recipe), *map(plan, whole)]  # D412


def tier_rungs(config: EngineConfig, rungs: list[KVLayout]) -> dict[int, int]:
    """Return the rung on which blocks go to the tiers, by layer group; the others go as they are."""
    names, below = ladder_of(config), config.kv_tier_format
    if below is None:
        return {}
    rung = 1 + (names.index(below) if below in names else len(names))
    return dict.fromkeys(rung_bytes([rungs[0], rungs[rung]]), rung)


class Upkeep:
    """Work for later: sessions are brought back, and indexed blocks are saved, to outlive the process."""

    def __init__(
        self,
        manager: BlockManager,
        cache: BlockCache,
        sessions: Sessions,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._blocks, self._cache, self._sessions, self._clock = manager.blocks, cache, sessions, clock
        self._allowed_s = 0.0  # time that steps have earned
        self.handover: HandOver | None = None
        self.guard: Guard | None = None

    def begin(self, core: Any) -> "HandOver | None":
        """Make the guard and the hand-over of an `EngineCore`, and return the latter."""
        self.guard, self.handover = make_guard(core), make_hand_over(core)
        return self.handover

    def after_step(self, seconds: float) -> None:
        """Save as many blocks as a small share of a step's `seconds` allows."""
        if self.handover is not None:
            self.handover.step_s = seconds
        if self._blocks.unsaved:
            self._allowed_s = min(self._allowed_s + _SHARE * seconds, _PIECE_S)
            self._allowed_s -= self._save(self._allowed_s)
        if self._blocks.tiers is not None:
            self._blocks.tiers.expire()
        if self.guard is not None:
            self.guard.after_step(seconds)

    def make_room(self, scheduler: Scheduler) -> None:
        """Give up blocks that requests which wait may need."""
        if self.guard is not None and len(scheduler.waiting) > 0:
            self.guard.make_room()

    def ending(self, branch: Branch) -> None:
        """Look at a branch that ends, while it has its blocks."""
        if self.guard is not None and not branch.request.tag:  # it computes with the base model
            self.guard.sample(branch)

    def when_idle(self) -> bool:
        """Work for a short time. Return False once there is nothing to do. No request may run."""
        if (self.handover is not None and self.handover.advance()) or self._sessions.prefetch_due():
            return True
        return self._save_some() or (self.guard is not None and self.guard.when_idle())

    def wait_s(self) -> float | None:
        """Return the seconds until `when_idle` may have something to do again, or None."""
        tiers, due_s = self._blocks.tiers, self._sessions.wait_s()
        if tiers is None or tiers.max_age_s is None or not len(tiers):
            return due_s
        return _EXPIRE_S if due_s is None else min(due_s, _EXPIRE_S)

    def _save_some(self) -> bool:
        """Save blocks for a short time. Return False once all are saved."""
        tiers = self._blocks.tiers
        if tiers is not None:
            tiers.expire()
        if tiers is not None and self._blocks.orders:
            self._cache.carry_out(self._blocks.take_orders())
        if tiers is None or not self._blocks.unsaved:
            return False
        if tiers.disk is not None and not tiers.disk.has_room:
            time.sleep(_FULL_S)
            return not tiers.disk.is_failing
        self._save(_PIECE_S)
        return True

    def close(self) -> None:
        """Save everything, and close the tiers. Waits for the disk."""
        if self.guard is not None:
            self.guard.close()
        tiers = self._blocks.tiers
        if tiers is None:
            return
        while self._save_some():
            pass
        tiers.close()

    def _save(self, seconds: float) -> float:
        """Save blocks for about `seconds`. Returns the time taken."""
        tiers, unsaved, began = self._blocks.tiers, self._blocks.unsaved, self._clock()
        assert tiers is not None, "only tiers with a disk have unsaved blocks"
        taken = 0.0
        while unsaved and taken < seconds and tiers.disk is not None and tiers.disk.has_room:
            group, block = at = next(iter(unsaved))
            node = unsaved.pop(at)
            key = node.key(group)
            if node.blocks[group] != block or not self._blocks.outlasts(group, node):
                continue
            if not tiers.is_saved(key):
                form = self._blocks.form_below(group, node)
                (content,) = self._cache.contents(group, [block], form.rung)
                tiers.save(key, content.numpy(), form)
            taken = self._clock() - began
        return taken
