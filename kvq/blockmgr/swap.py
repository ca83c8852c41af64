"""Swap space: moves a sequence's blocks to host slots and back, except blocks that are still indexed."""

from collections import deque
from collections.abc import Iterable

from kvq.blockmgr.blocks import Blocks
from kvq.blockmgr.events import SwapIn, SwapOut
from kvq.blockmgr.pool import BlockId, HostSlot
from kvq.blockmgr.prefix import Node
from kvq.blockmgr.sequence import Sequence
from kvq.errors import ConfigError, OutOfBlocks


class SwapSpace:
    """Host slots by layer group. Each slot is free or holds one block of a swapped-out sequence."""

    def __init__(self, blocks: Blocks, host_slots: list[int]) -> None:
        if len(host_slots) != len(blocks.pools) or any(count < 0 for count in host_slots):
            raise ConfigError(
                f"host_slots must be {len(blocks.pools)} counts of at least 0, one per layer group, "
                f"got {host_slots}"
            )
        self.num_slots = host_slots
        self._blocks = blocks
        self._free = [deque(HostSlot(i) for i in range(count)) for count in host_slots]

    @property
    def num_free(self) -> list[int]:
        """Number of free slots per layer group."""
        return [len(free) for free in self._free]

    def free_slots(self, group: int) -> set[HostSlot]:
        """Return the free slots of a layer group."""
        return set(self._free[group])

    def can_swap_out(self, sequence: Sequence) -> bool:
        """Return True if enough slots are free for all of a sequence's blocks. Changes nothing."""
        return all(sequence.num_held_in(group) <= len(free) for group, free in enumerate(self._free))

    def swap_out(self, sequence: Sequence) -> None:
        """Queue the move of all held blocks to host slots, and release the blocks, or raise OutOfBlocks."""
        if not self.can_swap_out(sequence):
            raise OutOfBlocks(
                f"{sequence.num_held} blocks don't fit into the free host slots per layer group "
                f"{self.num_free}; free the sequence and compute it again, or give more host memory"
            )
        moved: list[list[tuple[int, HostSlot]]] = []
        for group, table in enumerate(sequence.tables):
            slots = []
            for i in filter(lambda i: sequence.holds(group, i), range(sequence.starts[group], len(table))):
                slot = self._free[group].popleft()
                slots.append((i, slot))
                self._blocks.order(SwapOut(group=group, block=table[i], slot=slot))
            moved.append(slots)
        self._blocks.release(sequence.held)
        sequence.receipt.swapped += sequence.num_held
        sequence.starts = list(map(len, sequence.tables))
        sequence.swapped, sequence.ready = moved, False

    def can_swap_in(self, sequence: Sequence) -> bool:
        """Return True if `swap_in` would succeed now. Changes nothing."""
        found = self._find(sequence)
        return self._fits(self._demand(sequence, found), found)

    def swap_in(self, sequence: Sequence) -> None:
        """Share blocks that are still indexed, and queue swap-ins for the others, or raise OutOfBlocks."""
        assert sequence.swapped is not None, "checked by the manager"
        blocks = self._blocks
        found = self._find(sequence)
        demand = self._demand(sequence, found)
        if not self._fits(demand, found):
            raise OutOfBlocks(
                f"need {demand} blocks per layer group beside those shared, more than are free or cached; "
                f"finish or preempt another sequence"
            )
        shared = [list(held.values()) for held in found]
        blocks.share(shared)
        try:
            taken = blocks.take(demand, [[(sequence, 0, False)]])
        except BaseException:
            blocks.release(shared)
            raise
        for group, slots in enumerate(sequence.swapped):
            fresh = iter(taken[group])
            table = sequence.tables[group]
            for i, slot in slots:
                known = found[group].get(i)
                table[i] = next(fresh) if known is None else known
                sequence.mark(group, i)
                if known is None:
                    blocks.order(SwapIn(group=group, slot=slot, block=table[i]))
                self._free[group].append(slot)
            sequence.starts[group] = slots[0][0] if slots else len(table)
        sequence.swapped, sequence.ready = None, False
        self._set_depth(sequence)
        receipt = sequence.receipt
        receipt.own += sum(map(len, taken))
        receipt.shared += sum(map(len, found))
        sequence.note_peak(blocks.block_bytes)

    def lost(self, sequence: Sequence, failed: Iterable[SwapIn]) -> int | None:
        """Return the table index of the first block that a failed order should have filled, or None.

        Raises:
            ConfigError: some swap-in orders are still in the queue.
        """
        if any(isinstance(order, SwapIn) for order in self._blocks.orders):
            raise ConfigError("swap-ins were ordered and not carried out; take_orders() first")
        lost = []
        for order in failed:
            start = sequence.starts[order.group]
            held = sequence.tables[order.group][start:]
            if order.block in held:
                lost.append(start + held.index(order.block))
        return min(lost, default=None)

    def discard(self, sequence: Sequence) -> None:
        """Free the host slots of a swapped-out sequence."""
        for free, slots in zip(self._free, sequence.swapped or [], strict=False):
            free.extend(slot for _, slot in slots)
        sequence.swapped = None

    def _fits(self, demand: list[int], found: list[dict[int, BlockId]]) -> bool:
        return self._blocks.can_take(demand, beside=[list(held.values()) for held in found])

    def _find(self, sequence: Sequence) -> list[dict[int, BlockId]]:
        """Return the sequence's blocks that are still indexed, by group and table index. Changes nothing."""
        nodes = _path(sequence.node)
        found: list[dict[int, BlockId]] = []
        for group, slots in enumerate(sequence.swapped or []):
            held: dict[int, BlockId] = {}
            for i, _ in slots:
                block = nodes[i].blocks[group] if i < len(nodes) and nodes[i].alive else None
                if block is not None:
                    held[i] = block
            found.append(held)
        return found

    def _demand(self, sequence: Sequence, found: list[dict[int, BlockId]]) -> list[int]:
        assert sequence.swapped is not None, "the sequence is not swapped out"
        return [len(slots) - len(held) for slots, held in zip(sequence.swapped, found, strict=True)]

    def _set_depth(self, sequence: Sequence) -> None:
        """Reduce the indexed depth to the leading blocks that are still both indexed and held."""
        nodes = _path(sequence.node)
        depth = 0
        for i, node in enumerate(nodes):
            held = [
                g for g in range(len(sequence.tables)) if sequence.holds(g, i) and g != sequence.state_group
            ]
            if not node.alive or any(node.blocks[g] != sequence.tables[g][i] for g in held):
                break
            depth = i + 1
        while sequence.depth > depth:
            sequence.step_back()


def _path(node: Node) -> list[Node]:
    """Return the nodes from the first block down to `node`, without the root."""
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]
