"""Pins: prefixes that stay cached until a specified time, even if other sequences need memory."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from math import inf, isfinite

from kvq.blockmgr.blocks import Blocks
from kvq.blockmgr.hits import needed_blocks
from kvq.blockmgr.pool import BlockId
from kvq.blockmgr.prefix import Node
from kvq.blockmgr.sequence import Sequence
from kvq.errors import ConfigError, OutOfBlocks

Holder = tuple[str, str | None]  # a tenant, and the name of its session; None for pins of its requests
_Counts = list[Counter[BlockId]]  # number of pins per block, by layer group


@dataclass(slots=True, eq=False)
class _Pin:
    """References to the blocks of one prefix, held until a specified time."""

    length: int  # tokens
    blocks: list[list[BlockId]]  # per layer group
    until: float  # seconds, on the caller's clock


class Pins:
    """All pins of a block manager. Pinned blocks are never evicted, and the gauges count them as live."""

    def __init__(self, blocks: Blocks, max_blocks: int | None) -> None:
        if max_blocks is not None and max_blocks < 0:
            raise ConfigError(f"max_pinned_blocks must be at least 0, or None, got {max_blocks}")
        self._blocks = blocks
        self._max_blocks = max_blocks
        self._pins: dict[tuple[Node, Holder], _Pin] = {}  # by last block and holder
        self._next = inf  # no pin ends earlier
        self._pinned: _Counts = [Counter() for _ in blocks.pools]
        self._tenants: dict[str, _Counts] = defaultdict(lambda: [Counter() for _ in blocks.pools])

    def __len__(self) -> int:
        return len(self._pins)

    def all(self) -> list[_Pin]:
        """Return all pins."""
        return list(self._pins.values())

    def limit(self, group: int) -> int:  # D79: pins are references; at most half a pool
        """Return the maximum number of pinned blocks in a group: as configured, or half the pool."""
        total = self._blocks.pools[group].num_blocks
        return total // 2 if self._max_blocks is None else min(self._max_blocks, total)

    def num_pinned(self, group: int) -> int:
        """Return the number of pinned blocks in a layer group."""
        return len(self._pinned[group])

    def add(self, nodes: list[Node], until: float, holder: Holder) -> int:
        """Pin the blocks of a valid hit for `holder`, or extend its pin; see `BlockManager.pin`."""
        if not isfinite(until):
            raise ConfigError(f"a pin needs a time to end, in seconds, got {until}")
        if not nodes:
            return 0
        length = len(nodes) * self._blocks.block_size
        self._next = min(self._next, until)
        pin = self._pins.get((nodes[-1], holder))
        if pin is not None:
            pin.until = max(pin.until, until)
            return pin.length
        _, wanted = needed_blocks(self._blocks, nodes, length)
        self._check_limit(wanted, holder[0])
        self._blocks.share(wanted)
        for pinned, held in zip(self._pinned + self._tenants[holder[0]], wanted * 2, strict=True):
            pinned.update(held)
        self._pins[nodes[-1], holder] = _Pin(length, wanted, until)
        self._make_room()
        return length

    def expire(self, now: float) -> int:
        """Release the pins that expired at or before `now`, and return their number."""
        if now < self._next:
            return 0
        over = [at for at, pin in self._pins.items() if pin.until <= now]
        for at in over:
            self.release(*at)
        self._next = min((pin.until for pin in self._pins.values()), default=inf)
        return len(over)

    def release(self, node: Node, holder: Holder) -> None:
        """Release the holder's pin whose last block belongs to this node, if any."""
        pin = self._pins.pop((node, holder), None)
        if pin is None:
            return
        self._blocks.release(pin.blocks)
        own = self._tenants[holder[0]]
        for pinned, held in zip(self._pinned + own, pin.blocks * 2, strict=True):
            pinned.subtract(held)
            for block in held:
                if not pinned[block]:
                    del pinned[block]
        if not any(own):
            del self._tenants[holder[0]]

    def release_own(self, sequence: Sequence) -> None:
        """Release the pins whose last block this sequence computed itself."""
        node, depth, own = sequence.node, sequence.depth, set[Node]()
        while node.parent is not None and depth > sequence.found:
            own.add(node)
            node, depth = node.parent, depth - 1
        for at in [at for at in self._pins if at[0] in own]:
            self.release(*at)

    def release_first(self) -> bool:
        """Release the pin that expires first. Return False if there are no pins."""
        if not self._pins:
            return False
        self.release(*min(self._pins, key=lambda at: self._pins[at].until))
        return True

    def _make_room(self) -> None:
        """Release pins of the tenants with most blocks; none of a tenant within its share is among them."""
        for group, pinned in enumerate(self._pinned):
            while len(pinned) > self.limit(group):
                most = max(self._tenants, key=lambda tenant: len(self._tenants[tenant][group]))
                of_most = [at for at in self._pins if at[1][0] == most]
                self.release(*min(of_most, key=lambda at: self._pins[at].until))

    def _check_limit(self, wanted: list[list[BlockId]], tenant: str) -> None:
        num_tenants = len(self._tenants.keys() | {tenant})
        for group, held in enumerate(wanted):
            total = len(self._pinned[group]) + sum(block not in self._pinned[group] for block in held)
            own = self._tenants[tenant][group] if tenant in self._tenants else ()
            needs = len(own) + sum(block not in own for block in held)
            if total > self.limit(group) and needs > self.limit(group) // num_tenants:
                raise OutOfBlocks(
                    f"pins would hold {total} of {self._blocks.pools[group].num_blocks} blocks, the limit "
                    f"is {self.limit(group)}; let a pin expire, pin a shorter prefix, or raise "
                    f"max_pinned_blocks"
                )
