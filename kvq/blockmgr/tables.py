"""Tables: room for new tokens, copy-on-write, and giving blocks back."""

from collections.abc import Iterator

from kvq.blockmgr.blocks import Blocks
from kvq.blockmgr.events import Copy, Scrub
from kvq.blockmgr.pool import BlockId
from kvq.blockmgr.sequence import HOLE, Sequence
from kvq.blockmgr.states import States
from kvq.errors import ConfigError

Work = list[tuple[Sequence, int]]  # (sequence, new tokens)
_Grow = list[tuple[Sequence, int, bool]]  # who needs blocks: (sequence, new blocks, copy the last one?)


class Tables:
    """Operations on the tables of sequences."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks

    def plan(self, work: Work, *, snapshots: bool = True) -> list[_Grow]:
        """Per layer group, which sequences need blocks for `work`. Changes nothing.

        `snapshots`: leave recurrent states behind where they are wanted.
        """
        size, states = self._blocks.block_size, self._blocks.states
        plan: list[_Grow] = []
        for group, pool in enumerate(self._blocks.pools):
            if states is not None and group == states.group:
                plan.append(self._plan_states(states, work, snapshots=snapshots))
                continue
            grow: _Grow = []
            leaving: dict[BlockId, int] = {}  # references that earlier copies of this plan give up
            is_writable = pool.is_writable
            for sequence, count in self._within(work, group):
                table, length = sequence.tables[group], sequence.length
                room = len(table) * size - length
                if room and count and not is_writable(last := table[-1]):
                    gone = leaving.get(last, 0)
                    if pool.entry(last) is not None or pool.references(last) - gone > 1:
                        leaving[last] = gone + 1
                        grow.append((sequence, -(-max(0, count - room) // size), True))
                        continue
                if count > room:
                    grow.append((sequence, -((room - count) // size), False))
            plan.append(grow)
        return plan

    def _plan_states(self, states: States, work: Work, *, snapshots: bool) -> _Grow:
        grow: _Grow = []
        leaving: dict[BlockId, int] = {}
        for sequence, count in work:
            if count:
                step = states.step(sequence, count, snapshots=snapshots)
                copies = step.copies
                if copies:
                    last = sequence.tables[states.group][-1]
                    gone = leaving.get(last, 0)
                    copies = states.pool.entry(last) is not None or states.pool.references(last) - gone > 1
                    leaving[last] = gone + copies
                grow.append((sequence, step.need, copies))
        return grow

    def fitting(self, work: Work) -> tuple[list[_Grow], bool]:
        """The plan that blocks are there for, with snapshots if they can be taken; else the one without."""
        plan = self.plan(work)
        if self._blocks.states is None or self.can_take(plan):
            return plan, True
        return self.plan(work, snapshots=False), False

    def can_take(self, plan: list[_Grow]) -> bool:
        """True if blocks are there for a plan. Changes nothing."""
        demand = self.demand(plan)
        return self._blocks.can_take(demand, beside=[[] for _ in demand])

    def _within(self, work: Work, group: int) -> Work:
        """Of `work` the tokens that get slots in a layer group: those below its limit, if it has one."""
        limit = self._blocks.limits[group]
        if limit is None:
            return work
        return [(s, min(count, limit - s.length)) for s, count in work if s.length < limit]

    def demand(self, plan: list[_Grow]) -> list[int]:
        """The blocks that a plan takes, per layer group."""
        return [sum(need + copies for _, need, copies in grow) for grow in plan]

    def make_room(self, work: Work) -> None:
        """Take the blocks that `work` needs, copy-on-write included, or raise. Lengths stay as they are."""
        plan, snapshots = self.fitting(work)
        if any(plan):
            taken = self._blocks.take(self.demand(plan))
            states = self._blocks.states
            for group, grow in enumerate(plan):
                fresh = iter(taken[group])
                if states is not None and group == states.group:
                    self._move_states(states, work, grow, fresh, snapshots=snapshots)
                    continue
                for sequence, need, copies in grow:
                    self._extend(sequence, group, fresh, need, copies)
            for sequence in {id(s): s for grow in plan for s, _, _ in grow}.values():
                sequence.note_peak(self._blocks.block_bytes)

    def slots(self, work: Work) -> list[list[int]]:
        """The slots of `count` tokens from each sequence's length on, per layer group; -1 beyond a limit.

        None where recurrent states lie.
        """
        return [self._slots_of(work, group) for group in range(len(self._blocks.pools))]

    def _slots_of(self, work: Work, group: int) -> list[int]:
        limit = self._blocks.limits[group]
        if self._blocks.states is not None and group == self._blocks.states.group:
            return []
        return self._slots(work, group) if limit is None else self._slots_below(limit, work, group)

    def _extend(
        self, sequence: Sequence, group: int, fresh: Iterator[BlockId], need: int, copies: bool
    ) -> None:
        table = sequence.tables[group]
        sequence.mark(group, len(table) - copies)
        if copies:
            self._copy_last(sequence, group, next(fresh))
        table.extend(next(fresh) for _ in range(need))
        sequence.receipt.own += need + copies

    def _copy_last(self, sequence: Sequence, group: int, target: BlockId) -> None:
        """Give a sequence a copy of its last block, which somebody else sees too."""
        table = sequence.tables[group]
        source, table[-1] = table[-1], target
        self._blocks.order(Copy(group=group, source=source, target=target))
        self._blocks.pools[group].release(source)
        sequence.receipt.copied += 1

    def _move_states(
        self, states: States, work: Work, grow: _Grow, fresh: Iterator[BlockId], *, snapshots: bool
    ) -> None:
        for (sequence, count), (_, need, copies) in zip([w for w in work if w[1]], grow, strict=True):
            step = states.step(sequence, count, snapshots=snapshots)
            assert step.need == need, "a plan is carried out as it was made"
            if copies:
                self._copy_last(sequence, states.group, next(fresh))
            states.extend(sequence, count, step, fresh)
            sequence.receipt.own += need + copies

    def _slots(self, work: Work, group: int) -> list[int]:
        size = self._blocks.block_size
        slots: list[int] = []
        for sequence, count in work:
            table, at = sequence.tables[group], sequence.length
            if count == 1:
                slots.append(table[-1] * size + at % size)
                continue
            end = at + count
            while at < end:
                base, offset = table[at // size] * size, at % size
                stop = min(size, offset + end - at)
                slots.extend(range(base + offset, base + stop))
                at += stop - offset
        return slots

    def _slots_below(self, limit: int, work: Work, group: int) -> list[int]:
        slots: list[int] = []
        for sequence, count in work:
            kept = max(0, min(count, limit - sequence.length))
            slots += self._slots([(sequence, kept)], group)
            slots += [-1] * (count - kept)
        return slots

    def share_all(self, source: Sequence, target: Sequence) -> None:
        """Give `target`, an empty sequence, all of another's tokens, and its blocks by reference."""
        self._blocks.share(source.held)
        target.starts, target.tables = source.starts[:], [table[:] for table in source.tables]
        target.mark_all()
        target.receipt.shared = target.num_held
        target.note_peak(self._blocks.block_bytes)
        target.node, target.depth, target.indexing = source.node, source.depth, source.indexing
        target.length, target.committed, target.found = source.length, source.committed, source.found
        target.adopted, target.tail = source.adopted, source.tail
        target.tokens, target.digests = source.tokens[:], source.digests

    def can_shorten(self, sequence: Sequence, length: int, *, state_is_due: bool = False) -> bool:
        """True if every layer group still holds what a token at position `length` sees."""
        states = self._blocks.states
        return all(
            not length or start <= self._blocks.first_seen(group, length)
            for group, start in enumerate(sequence.starts)
            if states is None or group != states.group
        ) and (states is None or states.can_rewind(sequence, length, is_due=state_is_due))

    def shorten(self, sequence: Sequence, length: int, *, state_is_due: bool = False) -> None:
        """Release the blocks after the first `length` tokens, deepest first; see `BlockManager.truncate`."""
        if not 0 <= length <= sequence.length:
            raise ConfigError(f"can't truncate {sequence.length} tokens to {length}")
        if not self.can_shorten(sequence, length, state_is_due=state_is_due):
            raise ConfigError(
                f"can't truncate {sequence.length} tokens to {length}: what is seen there, of a sliding "
                f"window, of recent tokens or as a recurrent state, was given back; truncate before commit, "
                f"or to 0"
            )
        if self._blocks.states is not None:
            self._blocks.states.rewind(sequence, length)
        size = self._blocks.block_size
        keep = -(-length // size)
        for group, pool in enumerate(self._blocks.pools):
            table = sequence.tables[group]
            pool.release_all(b for b in reversed(table[max(keep, sequence.starts[group]) :]) if b != HOLE)
            del table[keep:]
            sequence.changed[group] = min(sequence.changed[group], keep)
            sequence.starts[group] = min(sequence.starts[group], keep)
        sequence.length, sequence.move = length, None
        sequence.committed = min(sequence.committed, length)
        sequence.adopted = min(sequence.adopted, length)
        sequence.digests = sequence.digests[: length // size]
        while sequence.depth > length // size:
            sequence.step_back()
        sequence.found = min(sequence.found, sequence.depth)

    def release_unseen(self, sequence: Sequence) -> None:
        """Release the blocks of sliding-window groups that no later token can see."""
        for group, window in enumerate(self._blocks.windows):
            if window is None:
                continue
            table, start = sequence.tables[group], sequence.starts[group]
            first = min(self._blocks.first_seen(group, sequence.committed), len(table))
            if self._blocks.states is not None and group == self._blocks.states.group:
                first = self._blocks.states.first_needed(sequence, first)
                if sequence.committed == sequence.length:
                    sequence.move = None
            if first > start:
                self._blocks.pools[group].release_all(b for b in table[start:first] if b != HOLE)
                gone = HOLE if group == sequence.state_group else BlockId(0)
                table[start:first] = [gone] * (first - start)
                sequence.starts[group] = first

    def scrub(self, sequence: Sequence, first: int = 0) -> None:
        """Queue zeroing of every block from index `first` on that only this sequence sees."""
        for group, (table, start) in enumerate(zip(sequence.tables, sequence.starts, strict=True)):
            for block in table[max(start, first) :]:
                if block != HOLE and self._blocks.pools[group].is_writable(block):
                    self._blocks.orders.append(Scrub(group=group, block=block))

    def utilization(self, sequences: list[Sequence]) -> float:
        """Tokens held / slots of live blocks, over all layer groups but states; 1.0 when nothing is live."""
        size = self._blocks.block_size
        slots = unused = 0
        sequences = [sequence for sequence in sequences if not sequence.is_swapped]
        for group, pool in enumerate(self._blocks.pools):
            if self._blocks.states is not None and group == self._blocks.states.group:
                continue
            slots += pool.num_live * size
            tails: dict[BlockId, int] = {}  # last blocks that are not full, and their empty slots
            for sequence in sequences:
                table = sequence.tables[group]
                if (empty := len(table) * size - sequence.length) > 0:  # below 0 beyond a limit
                    tails[table[-1]] = min(empty, tails.get(table[-1], empty))
            if any(pool.references(block) > 1 for block in tails):
                for sequence in sequences:  # a fork may be further on in the same block
                    for block in sequence.tables[group][sequence.starts[group] : sequence.length // size]:
                        tails.pop(block, None)
            unused += sum(empty for block, empty in tails.items() if pool.entry(block) is None)
        return 1 - unused / slots if slots else 1.0
