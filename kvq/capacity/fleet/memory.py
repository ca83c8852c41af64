"""Tiers and ladder of a simulated engine: the engine's own, with stand-ins for the bytes and for the disk."""

from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

from kvq.blockmgr.events import Demote, Fill, Order
from kvq.blockmgr.packed.ladder import Pack
from kvq.tiers.disk import Block, DiskTier
from kvq.tiers.sealing import Sealing
from kvq.tiers.tiers import Tiers

_UNIT = 1024  # bytes that one byte stands for


@dataclass(frozen=True, kw_only=True, slots=True)
class TierSpec:
    """Sizes and speeds of what keeps blocks beyond the pools; by default, nothing."""

    block_bytes: list[int] = field(default_factory=list)  # by layer group
    rungs: dict[int, list[int]] = field(default_factory=dict)  # of a ladder; see `Holding`
    host_bytes: int = 0
    disk_bytes: int = 0
    groups: set[int] | None = None  # layer groups that the tiers keep; None: all
    host_s: float = 1 / 20e9  # per byte that moves between pools and host memory, or is packed
    disk_s: float = 1 / 2e9  # per byte read from the disk

    def disk(self) -> "_Disk":
        """Return an empty disk, for an engine and those that replace it."""
        return _Disk(self)

    def carry_out(self, orders: Iterable[Order], tiers: Tiers | None) -> list[int]:
        """Carry out a step's orders, and return the number of bytes that each moves."""
        moved = []
        for order in (order for order in orders if isinstance(order, Demote | Fill | Pack)):
            sizes = [self.block_bytes[order.group], *self.rungs.get(order.group, [])]
            if isinstance(order, Pack):
                moved += sizes[:1] * len(order.sources)
                continue
            moved.append(sizes[order.form.rung if isinstance(order, Demote) else order.rung])
            if isinstance(order, Demote) and tiers is not None:
                tiers.put(order.key, bytes(moved[-1] // _UNIT or 1), order.form)
        return moved


class _Disk:
    """Stand-in for a `DiskTier`, in which reads take simulated time and the oldest blocks leave."""

    def __init__(self, spec: TierSpec) -> None:
        self._spec, self.sealing, self._left = spec, Sealing(), spec.disk_bytes // _UNIT
        self._blocks: OrderedDict[bytes, tuple[Any, Any]] = OrderedDict()  # content and form by name
        self._reads: list[tuple[float, Future[list[Any]], list[Any]]] = []  # with the times of their ends
        self._now = self._busy_s = 0.0
        self.holds = self._blocks.__contains__

    def tiers(self) -> Tiers | None:
        """Return tiers over this disk, with empty host memory, or None if an engine has none."""
        host, disk = self._spec.host_bytes // _UNIT, cast(DiskTier, self) if self._spec.disk_bytes else None
        return Tiers(host, disk, groups=self._spec.groups) if host or disk else None

    def find(self, name: bytes) -> Any:
        return self._blocks.get(name, (None, None))[1]

    def write(self, block: Block, content: Any, form: Any, _: float = 0.0) -> None:
        self._left -= 0 if block[1] in self._blocks else len(content)
        self._blocks[block[1]] = content, form
        while self._left < 0:
            self._left += len(self._blocks.popitem(last=False)[1][0])

    def read(self, blocks: list[Block]) -> Future[list[Any]]:
        found = [self._blocks.get(name) for _, name, _ in blocks]
        nbytes = _UNIT * sum([len(one[0]) for one in found if one])
        self._busy_s = max(self._now, self._busy_s) + self._spec.disk_s * nbytes
        self._reads.append((self._busy_s, Future(), found))
        return self._reads[-1][1]

    def advance(self, now: float) -> None:
        """End the reads that have ended by `now`."""
        self._now = now
        while self._reads and self._reads[0][0] <= now:
            _, future, found = self._reads.pop(0)
            future.set_result(found)
