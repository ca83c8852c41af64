"""Planned memory against what the process or the driver reports, term by term."""

import logging
from dataclasses import dataclass
from functools import cached_property

from kvq.cache import KVCache
from kvq.cache.memory import held_bytes
from kvq.capacity.plan.parameters import count_parameters
from kvq.capacity.plan.pools import bytes_of
from kvq.errors import ConfigError
from kvq.models import Model
from kvq.models.checkpoint import read_json
from kvq.weights import packed_layers
from kvq.weights import weight_bytes as held_in

_log = logging.getLogger("kvq")
TOLERANCE = 0.03  # of all that the process holds


@dataclass(frozen=True, slots=True)
class Line:
    """One term, in bytes."""

    name: str
    planned: int
    found: int

    @property
    def off(self) -> int:
        """By how much more than planned there is."""
        return self.found - self.planned


@dataclass(frozen=True)
class Reconciliation:
    """All terms; the last one is the whole of the process, or of PyTorch's memory on a GPU."""

    lines: tuple[Line, ...]

    @property
    def whole(self) -> Line:
        """The last term."""
        return self.lines[-1]

    @cached_property
    def wrong(self) -> list[Line]:
        """Terms that are off by more than the tolerance, as a share of the whole."""
        return [line for line in self.lines if abs(line.off) > TOLERANCE * self.whole.planned]

    def report(self) -> None:
        """Log it: a warning where something is off."""
        told = ", ".join(
            f"{line.name} {line.found / 1e6:,.1f} MB (planned {line.planned / 1e6:,.1f})"
            for line in self.lines
        )
        if self.wrong:
            names = " and ".join(line.name for line in self.wrong)
            _log.warning("memory: %s; %s: more than %.0f%% off the plan", told, names, 100 * TOLERANCE)
        else:
            _log.info("memory: %s", told)


def reconcile(model: Model, cache: KVCache, num_blocks: list[int], before: int) -> Reconciliation:
    """Look at an engine that was just built; `before`: what was held when that began."""
    weights = model.weights
    spare = [held - planned for held, planned in zip(cache.num_blocks, num_blocks, strict=True)]
    planned_weights = weight_bytes(model)
    planned_pool = bytes_of(model.layout, num_blocks)
    rest = before - weights.held_bytes
    whole = held_bytes(weights.device)
    return Reconciliation(
        (
            Line("weights", planned_weights, weights.held_bytes),
            Line("KV pool", planned_pool, cache.nbytes - bytes_of(model.layout, spare)),
            Line("in all", rest + planned_weights + planned_pool, whole),
        )
    )


def weight_bytes(model: Model) -> int:
    """As its configuration counts them, in the type that they were loaded in."""
    weights = model.weights
    if packed_layers(weights.model):
        return held_in(weights.model)
    size: int = weights.model.dtype.itemsize
    config = read_json(weights.folder / "config.json")
    try:
        return count_parameters(config, weights.geometry).total * size
    except ConfigError:  # a family that is not counted
        return held_in(weights.model)
