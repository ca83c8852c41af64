"""Tiers and ladder of a simulated engine: the engine's own, with stand-ins for the bytes and for the disk."""

from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

from kvq.blockmgr.events import Demote, Fill, Order
from kvq.blockmgr.packed.ladder import Pack, Packed
from kvq.layout import Holding
from kvq.scheduler.costs import CostModel
from kvq.tiers.disk import Block, DiskTier
from kvq.tiers.sealing import Sealing
from kvq.tiers.tiers import Tiers

_UNIT = 1024  # bytes that one byte stands for


@dataclass(frozen=True, kw_only=True, slots=True)
class TierSpec:
    """Sizes and speeds of what keeps blocks beyond the pools; by default, nothing."""

    holding: Holding = field(default_factory=Holding)  # the bytes of blocks, also in a ladder's formats
    host_bytes: int = 0
    disk_bytes: int = 0
    groups: set[int] | None = None  # layer groups that the tiers keep; None: all
    host_s: float = 1 / 20e9  # per byte that moves between pools and host memory, or is packed
    disk_s: float = 1 / 2e9  # per byte read from the disk


class SimulatedTiers:
    """What keeps the blocks of one engine beyond the pools. The disk outlives the engine."""

    def __init__(self, spec: TierSpec) -> None:
        self._spec, self.holding, rungs = spec, spec.holding, spec.holding.get("rungs", {})
        sizes = enumerate(spec.holding.get("block_bytes", []))
        self._sizes = [[size, *rungs.get(group, [])] for group, size in sizes]
        self.disk = _Disk(spec.disk_bytes // _UNIT, spec.disk_s * _UNIT)
        self._tiers = self.begin()

    def begin(self) -> Tiers | None:
        """Return tiers with empty host memory, for a new engine, or None if it has none."""
        spec, disk = self._spec, cast(DiskTier, self.disk) if self._spec.disk_bytes else None
        has_tiers = spec.host_bytes or spec.disk_bytes
        self._tiers = Tiers(spec.host_bytes // _UNIT, disk, groups=spec.groups) if has_tiers else None
        return self._tiers

    def carry_out(self, orders: Iterable[Order], costs: CostModel) -> float:
        """Carry out a step's orders. Return the seconds that this takes, and report them to `costs`."""
        moved: list[int] = []  # bytes
        for order in orders:
            match order:
                case Demote(group=group, form=form) if self._tiers is not None:
                    moved.append(self._sizes[group][form.rung])
                    self._tiers.put(order.key, bytes(moved[-1] // _UNIT or 1), form)
                case Fill(group=group, rung=rung, content=content):
                    moved.append(self._sizes[group][0 if isinstance(content, Packed) else rung])
                case Pack(group=group, sources=sources):
                    moved += [self._sizes[group][0]] * len(sources)
        seconds = self._spec.host_s * sum(moved)
        if moved:
            costs.observe_swap(len(moved) / 2, seconds)
        return seconds


class _Disk:
    """Stand-in for a `DiskTier`: reads take simulated time, and the least recently used blocks leave."""

    def __init__(self, budget: int, byte_s: float) -> None:
        self._left, self._byte_s, self.sealing = budget, byte_s, Sealing()
        self._blocks: OrderedDict[bytes, tuple[Any, Any]] = OrderedDict()  # content and form by name
        self._reads: list[tuple[float, Future[list[Any]], list[Any]]] = []  # with the times of their ends
        self._now = 0.0

    def holds(self, name: bytes) -> bool:
        return name in self._blocks

    def find(self, name: bytes) -> Any:
        return self._blocks.get(name, (None, None))[1]

    def write(self, block: Block, content: Any, form: Any) -> None:
        if block[1] not in self._blocks:
            self._blocks[block[1]] = content, form
            self._left -= len(content)
        while self._left < 0:
            self._left += len(self._blocks.popitem(last=False)[1][0])

    def read(self, blocks: list[Block]) -> Future[list[Any]]:
        found = [self._blocks.get(name) for _, name, _ in blocks]
        for name in [name for _, name, _ in blocks if name in self._blocks]:
            self._blocks.move_to_end(name)
        seconds = self._byte_s * sum([len(one[0]) for one in found if one])
        self._reads.append((max([self._now, *(end for end, _, _ in self._reads)]) + seconds, Future(), found))
        return self._reads[-1][1]

    def refresh(self) -> None:
        """Nobody else writes."""

    def advance(self, now: float) -> None:
        """End the reads that have ended by `now`."""
        self._now = now
        while self._reads and self._reads[0][0] <= now:
            _, future, found = self._reads.pop(0)
            future.set_result(found)
