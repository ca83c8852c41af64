"""Tiers of an engine: built from its options, and filled with blocks that are still in the pools."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from kvq.blockmgr import BlockManager
from kvq.cache.backend import CacheBackend
from kvq.engine.config import EngineConfig
from kvq.engine.exactness import engine_facts
from kvq.layout import KVLayout
from kvq.models import Model
from kvq.sizes import binary, parse_bytes
from kvq.tiers.disk import DiskTier
from kvq.tiers.folder import Folder
from kvq.tiers.sealing import KeyedSealing, Sealing
from kvq.tiers.tiers import Tiers

_log = logging.getLogger("kvq")
_SHARE = 0.05  # of the time of steps, for saving blocks while requests run
_PIECE_S = 0.02  # when idle: a new request waits this long at most
_FULL_S = 0.005  # until the queue of a slow disk is looked at again


def engine_identity(model: Model) -> bytes:
    """Return the digest's input that tells an engine's prefixes from those of other models and recipes.

    Engines that promise exactness also tell programs apart.
    """
    facts = engine_facts(model)
    if not model.prepared.exact:
        del facts["program"]
    return repr(facts).encode()


def build_tiers(config: EngineConfig, model: Model) -> Tiers | None:
    """Return the tiers that an engine's options ask for, or None.

    Raises:
        ConfigError: the folder or the key can't be used, or a budget is too small.
    """
    host, disk = parse_bytes(config.kv_host, "kv_host"), parse_bytes(config.kv_disk, "kv_disk")
    if not host and not disk:
        return None
    sealing = Sealing() if config.kv_key_file is None else KeyedSealing(config.kv_key_file)
    files = None
    if config.kv_dir is not None:
        facts = {
            "model": model.prepared.digest,
            "kv": model.recipe.name[:64],
            "recipe": model.recipe.digest(),
        }
        folder = Folder(Path(config.kv_dir), disk, _largest(model.layout))
        files = DiskTier(
            folder, sealing, facts, max_age_s=config.kv_max_age_s, tenant_share=config.kv_tenant_share
        )
        _log.info("KV on disk: %d blocks, %s in %s", len(files), binary(files.nbytes), folder.path)
    return Tiers(host, files, sealing, max_age_s=config.kv_max_age_s, tenant_share=config.kv_tenant_share)


def _largest(layout: KVLayout) -> int:
    return max(group.block_bytes for group in layout.groups)


class Saver:
    """Saver of indexed blocks to the disk, so that they outlive the process even if it is killed."""

    def __init__(
        self, manager: BlockManager, cache: CacheBackend, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._blocks, self._cache, self._clock = manager.blocks, cache, clock
        self._allowed_s = 0.0  # time that steps have earned

    def after_step(self, seconds: float) -> None:
        """Save as many blocks as a small share of a step's `seconds` allows."""
        if self._blocks.unsaved:
            self._allowed_s = min(self._allowed_s + _SHARE * seconds, _PIECE_S)
            self._allowed_s -= self._save(self._allowed_s)

    def when_idle(self) -> bool:
        """Save blocks for a short time. Return False once there is nothing to do. No request may run."""
        tiers = self._blocks.tiers
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
        tiers = self._blocks.tiers
        if tiers is None:
            return
        while self.when_idle():
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
            if node.blocks[group] == block and not tiers.is_saved(key):
                tiers.save(key, self._cache.read_block(group, block).numpy())
            taken = self._clock() - began
        return taken
