"""Block tables: sharing the blocks of hits, allocation for new tokens, copy-on-write, and release."""

from collections.abc import Iterator

from kvq.blockmgr.blocks import Blocks
from kvq.blockmgr.events import Copy, Found, Scrub
from kvq.blockmgr.hits import Hit, check_prompt, needed_blocks
from kvq.blockmgr.pool import BlockId
from kvq.blockmgr.prefix import Node, PrefixQuery
from kvq.blockmgr.sequence import HOLE, Sequence, Work
from kvq.blockmgr.states import States
from kvq.errors import ConfigError, OutOfBlocks

_Grow = list[tuple[Sequence, int, bool]]  # (sequence, new blocks, whether to copy the last block)


class Tables:
    """Operations on the block tables of sequences."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks

    def fill(self, sequence: Sequence, hit: Hit) -> None:
        """Share a prefix hit with the prompt's new, empty sequence, and queue the copy of a partial block.

        The partial block is skipped if no block is free for the copy. Never raises OutOfBlocks.
        """
        events = self.blocks.events
        sequence.length = len(hit.nodes) * self.blocks.block_size
        starts, held = needed_blocks(self.blocks, hit.nodes, sequence.length)
        self.blocks.share(held)
        if events.active:
            for group, blocks in enumerate(held):
                for block in blocks:
                    events.add(Found(group=group, block=block))
        sequence.fill(starts, held)
        if hit.nodes:
            sequence.node = hit.nodes[-1]
        sequence.depth = sequence.found = len(hit.nodes)
        sequence.receipt.shared = sequence.num_held
        if hit.part is not None:
            self._copy_part(sequence, hit.part, hit.length)
        sequence.committed = sequence.length
        sequence.receipt.reused = sequence.length
        sequence.note_peak(self.blocks.block_bytes)

    def _copy_part(self, sequence: Sequence, part: Node, length: int) -> None:
        """Copy a block whose first tokens come next in the prompt, if every group has a free block for it."""
        blocks = self.blocks
        sources = [[] if block is None else [block] for block in part.blocks]
        copied = sum(map(len, sources))
        assert copied == blocks.num_groups_at(part.depth - 1), "a part is there in every layer group"
        blocks.share(sources)  # so that they can't be evicted to make room
        try:
            taken = blocks.take(list(map(len, sources)), [[(sequence, 1, True)]])
        except OutOfBlocks:
            return
        finally:
            blocks.release(sources)
        for group, pairs in enumerate(map(zip, sources, taken)):
            for source, target in pairs:
                blocks.order(Copy(group=group, source=source, target=target))
                sequence.mark(group, len(sequence.tables[group]))
                sequence.tables[group].append(target)
        sequence.length = length
        sequence.receipt.own += copied
        sequence.receipt.copied += copied

    def take_prefix(self, prompt: PrefixQuery, length: int) -> tuple[list[int], list[list[BlockId]]]:
        """Allocate blocks for the first `length` tokens of a prompt; see `BlockManager.adopt`.

        Returns the table index of the first block and the allocated blocks, both by layer group.
        """
        check_prompt(self.blocks, prompt)
        blocks, num_tokens = self.blocks, len(prompt.tokens)
        if length % blocks.block_size or not 0 <= length <= num_tokens:
            raise ConfigError(
                f"length must be a multiple of the block size {blocks.block_size} and at most the "
                f"prompt's {num_tokens} tokens, got {length}"
            )
        return self.take_first(length)

    def take_first(self, length: int) -> tuple[list[int], list[list[BlockId]]]:
        """Allocate the blocks that a token at position `length` needs, like `take_prefix`."""
        blocks = self.blocks
        ends = [blocks.entries(group, length) for group in range(len(blocks.pools))]
        starts = [min(blocks.first_seen(group, length), end) for group, end in enumerate(ends)]
        return starts, blocks.take([end - first for first, end in zip(starts, ends, strict=True)])

    def plan(self, work: Work, *, snapshots: bool = True) -> list[_Grow]:
        """Return the sequences that need blocks for `work`, by layer group. Changes nothing.

        `snapshots`: whether to keep snapshots of recurrent states where they are due.
        """
        size, states = self.blocks.block_size, self.blocks.states
        plan: list[_Grow] = []
        for group, pool in enumerate(self.blocks.pools):
            if states is not None and group == states.group:
                plan.append(self._plan_states(states, work, snapshots=snapshots))
                continue
            grow: _Grow = []
            leaving: dict[BlockId, int] = {}  # references that earlier copies in this plan drop
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
        """Return (plan, whether it has snapshots). Snapshots are included if the pools have room for them."""
        plan = self.plan(work)
        if self.blocks.states is None or self.can_take(plan):
            return plan, True
        return self.plan(work, snapshots=False), False

    def can_take(self, plan: list[_Grow]) -> bool:
        """Return True if the pools have enough blocks for a plan. Changes nothing."""
        demand = self.demand(plan)
        return self.blocks.can_take(demand, beside=[[] for _ in demand])

    def _within(self, work: Work, group: int) -> Work:
        """Return the part of `work` that gets slots in a layer group, that is, tokens below its limit."""
        limit = self.blocks.limits[group]
        if limit is None:
            return work
        return [(s, min(count, limit - s.length)) for s, count in work if s.length < limit]

    def demand(self, plan: list[_Grow]) -> list[int]:
        """Return the number of blocks that a plan needs, by layer group."""
        return [sum(need + copies for _, need, copies in grow) for grow in plan]

    def make_room(self, work: Work) -> None:
        """Allocate the blocks for `work`, including copies, or raise OutOfBlocks. Lengths don't change."""
        plan, snapshots = self.fitting(work)
        if any(plan):
            taken = self.blocks.take(self.demand(plan), plan)
            states = self.blocks.states
            for group, grow in enumerate(plan):
                fresh = iter(taken[group])
                if states is not None and group == states.group:
                    self._move_states(states, work, grow, fresh, snapshots=snapshots)
                    continue
                for sequence, need, copies in grow:
                    self._extend(sequence, group, fresh, need, copies)
            for sequence in {id(s): s for grow in plan for s, _, _ in grow}.values():
                sequence.note_peak(self.blocks.block_bytes)

    def slots(self, work: Work) -> list[list[int]]:
        """Return the slots of the last `count` tokens of each sequence, by layer group.

        A slot beyond a group's limit is -1. A group of recurrent states has no slots.
        """
        return [
            [] if group == self.blocks.state_group else self._slots(work, group)
            for group in range(len(self.blocks.pools))
        ]

    def _slots(self, work: Work, group: int) -> list[int]:
        size, limit = self.blocks.block_size, self.blocks.limits[group]
        slots: list[int] = []
        for sequence, count in work:
            table, at = sequence.tables[group], sequence.length - count
            if count == 1 and limit is None:
                slots.append(table[-1] * size + at % size)
                continue
            end = at + count
            kept = end if limit is None else max(at, min(end, limit))
            first = at // size
            spanned: list[int] = []
            for block in table[first : -(-kept // size)]:
                spanned.extend(range(block * size, (block + 1) * size))
            slots += spanned[at % size : kept - first * size]
            slots.extend([-1] * (end - kept))
        return slots

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
        """Replace a sequence's last block, which is shared, with a copy."""
        table = sequence.tables[group]
        source, table[-1] = table[-1], target
        self.blocks.order(Copy(group=group, source=source, target=target))
        self.blocks.pools[group].release(source)
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

    def share_all(self, source: Sequence, target: Sequence) -> None:
        """Copy all tokens of `source` to the empty sequence `target`, and share the blocks of `source`."""
        self.blocks.share(source.held)
        target.starts, target.tables = source.starts[:], [table[:] for table in source.tables]
        target.mark_all()
        target.receipt.shared = target.num_held
        target.note_peak(self.blocks.block_bytes)
        target.node, target.depth, target.indexing = source.node, source.depth, source.indexing
        target.length, target.committed, target.found = source.length, source.committed, source.found
        target.adopted, target.tail = source.adopted, source.tail
        target.tokens, target.digests, target.tag = source.tokens[:], source.digests, source.tag
        target.request = source.request

    def can_shorten(self, sequence: Sequence, length: int, *, state_is_due: bool = False) -> bool:
        """Return True if every layer group still holds the blocks that a token at position `length` sees."""
        states = self.blocks.states
        return all(
            not length or start <= self.blocks.first_seen(group, length)
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
        if self.blocks.states is not None:
            self.blocks.states.rewind(sequence, length)
        size = self.blocks.block_size
        keep = -(-length // size)
        for group, pool in enumerate(self.blocks.pools):
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
        """Release the sliding-window groups' blocks that no later token can see."""
        for group, window in enumerate(self.blocks.windows):
            if window is None:
                continue
            table, start = sequence.tables[group], sequence.starts[group]
            first = min(self.blocks.first_seen(group, sequence.committed), len(table))
            if self.blocks.states is not None and group == self.blocks.states.group:
                first = self.blocks.states.first_needed(sequence, first)
                if sequence.committed == sequence.length:
                    sequence.move = None
            if first > start:
                self.blocks.pools[group].release_all(b for b in table[start:first] if b != HOLE)
                gone = HOLE if group == sequence.state_group else BlockId(0)
                table[start:first] = [gone] * (first - start)
                sequence.starts[group] = first

    def scrub(self, sequence: Sequence, first: int = 0) -> None:
        """Queue zeroing of all blocks from index `first` on that no other sequence sees."""
        for group, (table, start) in enumerate(zip(sequence.tables, sequence.starts, strict=True)):
            for block in table[max(start, first) :]:
                if block != HOLE and self.blocks.pools[group].is_writable(block):
                    self.blocks.orders.append(Scrub(group=group, block=block))

    def utilization(self, sequences: list[Sequence]) -> float:
        """Return tokens held / slots of live blocks, over all groups except states, or 1.0 without blocks."""
        size = self.blocks.block_size
        slots = unused = 0
        for group, pool in enumerate(self.blocks.pools):
            if self.blocks.states is not None and group == self.blocks.states.group:
                continue
            slots += pool.num_live * size
            tails: dict[BlockId, int] = {}  # last blocks that are not full, and their empty slots
            for sequence in sequences:
                table = sequence.tables[group]
                if (empty := len(table) * size - sequence.length) > 0:  # negative beyond a limit
                    tails[table[-1]] = min(empty, tails.get(table[-1], empty))
            if any(pool.references(block) > 1 for block in tails):
                for sequence in sequences:  # a fork may have filled the same block further
                    for block in sequence.tables[group][sequence.starts[group] : sequence.length // size]:
                        tails.pop(block, None)
            unused += sum(empty for block, empty in tails.items() if pool.entry(block) is None)
        return 1 - unused / slots if slots else 1.0
