"""Tiers and ladder of a simulated engine: the engine's own, with stand-ins for the bytes and for the disk."""

from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

from kvq.blockmgr.events import Demote, Fill, Order
from kvq.blockmgr.packed.ladder import Pack, Packed
from kvq.layout import Holding
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

    def tiers(self, disk: "SimulatedDisk") -> Tiers | None:
        """Return tiers with empty host memory for an engine, or None if it has none."""
        below = cast(DiskTier, disk) if self.disk_bytes else None
        has_tiers = self.host_bytes or self.disk_bytes
        return Tiers(self.host_bytes // _UNIT, below, groups=self.groups) if has_tiers else None

    def carry_out(self, orders: Iterable[Order], tiers: Tiers | None) -> list[int]:
        """Carry out a step's orders, and return the number of bytes that each moves."""
        moved = []
        for order in orders:
            if not isinstance(order, Demote | Fill | Pack):
                continue
            own = self.holding["block_bytes"][order.group]
            sizes = [own, *self.holding.get("rungs", {}).get(order.group, [])]
            if isinstance(order, Pack):
                moved += [own] * len(order.sources)
            elif isinstance(order, Fill):
                moved.append(own if isinstance(order.content, Packed) else sizes[order.rung])
            elif tiers is not None:
                moved.append(sizes[order.form.rung])
                tiers.put(order.key, bytes(moved[-1] // _UNIT or 1), order.form)
        return moved


class SimulatedDisk:
    """Stand-in for a `DiskTier`: reads take simulated time, and the least recently used blocks leave."""

    def __init__(self, spec: TierSpec) -> None:
        self._left, self._byte_s, self.sealing = spec.disk_bytes // _UNIT, spec.disk_s * _UNIT, Sealing()
        self._blocks: OrderedDict[bytes, tuple[Any, Any]] = OrderedDict()  # content and form by name
        self._reads: list[tuple[float, Future[list[Any]], list[Any]]] = []  # with the times of their ends
        self._now = self._busy_s = 0.0
        self.holds = self._blocks.__contains__

    def find(self, name: bytes) -> Any:
        """Return the form of a block, or None."""
        return self._blocks.get(name, (None, None))[1]

    def write(self, block: Block, content: Any, form: Any) -> None:
        """Store a block."""
        if block[1] not in self._blocks:
            self._blocks[block[1]] = content, form
            self._left -= len(content)
        while self._left < 0:
            self._left += len(self._blocks.popitem(last=False)[1][0])

    def read(self, blocks: list[Block]) -> Future[list[Any]]:
        """Begin to read blocks."""
        found = [self._blocks.get(name) for _, name, _ in blocks]
        for name in [name for _, name, _ in blocks if name in self._blocks]:
            self._blocks.move_to_end(name)
        seconds = self._byte_s * sum([len(one[0]) for one in found if one])
        self._busy_s = max(self._now, self._busy_s) + seconds
        self._reads.append((self._busy_s, Future(), found))
        return self._reads[-1][1]

    def refresh(self) -> None:
        """Do nothing, since nobody else writes."""

    def advance(self, now: float) -> None:
        """End the reads that have ended by `now`."""
        self._now = now
        while self._reads and self._reads[0][0] <= now:
            _, future, found = self._reads.pop(0)
            future.set_result(found)
