"""The block manager: sequences over shared blocks, from the first token to the last release."""

from collections.abc import Iterable
from dataclasses import replace

from kvq.blockmgr.events import SwapIn
from kvq.blockmgr.integrity import check_integrity
from kvq.blockmgr.keeper import BlockKeeper
from kvq.blockmgr.prefix import PrefixQuery, token_array
from kvq.blockmgr.prefixes import check_prompt
from kvq.blockmgr.sequence import BlockUse, Sequence
from kvq.blockmgr.tables import Work
from kvq.errors import ConfigError


class BlockManager(BlockKeeper):
    """Decides which block holds what: allocation, sharing, copy-on-write, prefix reuse, swapping.

    It owns no bytes. What has to happen to them is queued as orders, which `take_orders` hands out
    and `kvq.cache` carries out before the step's writes. All calls come from one thread.

        prompt = manager.prompt(token_ids, tenant="a")
        sequence = manager.start(prompt)              # hits are shared; sequence.length is reused
        slots = manager.append([(sequence, 5)])       # where the next tokens' K and V go
        cache.carry_out(manager.take_orders())        # then run the step
        manager.commit(sequence, [sampled_token])     # its KV is good: others may reuse it
        receipt = manager.free(sequence)
    """

    def sequences(self) -> list[Sequence]:
        """All live sequences, swapped ones included, in order of their start."""
        return list(self._register)

    def new_sequence(self, *, tenant: str = "") -> Sequence:
        """Start an empty sequence without looking for a prefix; it holds no blocks yet."""
        sequence = Sequence(
            tables=[[] for _ in self.pools],
            starts=[0] * len(self.pools),
            node=self.blocks.index.root(self.blocks.index.root_digest(tenant)),
            tenant=tenant,
            state_group=-1 if self.blocks.states is None else self.blocks.states.group,
        )
        self._register.add(sequence)
        return sequence

    def start(self, prompt: PrefixQuery) -> Sequence:
        """Start a sequence from the longest prefix hit; `length` is what need not be computed.

        At least one token of the prompt is left to compute. A block that matches only in its first
        tokens is copied, if a block is free for it.
        """
        sequence = self._begin(prompt)
        self.prefixes.fill(sequence, prompt)
        self.prefixes.announce(sequence, prompt)
        self.blocks.events.deliver()
        return sequence

    def adopt(self, prompt: PrefixQuery, length: int) -> Sequence:
        """Start a sequence whose first `length` tokens will be filled in, not computed.

        Full-attention groups get blocks for all of it, sliding-window groups for the last window, those
        with a limit up to that.
        Fill every block of `tables[g][starts[g]:]`, then `commit`, which indexes all of them, with a lag too;
        without it, `free` leaves nothing.

        Raises:
            ConfigError: `length` is no multiple of the block size, or beyond the prompt.
            OutOfBlocks: too few blocks; nothing changed.
        """
        sequence = self._begin(prompt)
        try:
            self.prefixes.adopt(sequence, length)
        except BaseException:
            self._end(sequence)
            raise
        self.prefixes.announce(sequence, prompt)
        self.blocks.events.deliver()
        return sequence

    def can_append(self, work: Work) -> bool:
        """True if blocks are there for `append(work)`. Changes nothing."""
        self._register.check_work(work)
        return self._tables.can_take(self._tables.fitting(work)[0])

    def append(self, work: Work) -> list[list[int]]:
        """Make room for new tokens: (sequence, count) each. Return their slots per layer group.

        All or nothing over all sequences and groups. A last block that somebody else sees too, a
        fork or the index, is copied first: the order is queued, exactly once. Tokens beyond a group's
        limit have no slot there: -1. Recurrent states have none at all: see `Sequence.move`.

        Raises:
            OutOfBlocks: a pool has too few blocks; nothing changed.
            ConfigError: a negative count, a sequence twice, or one that can't be used now.
        """
        self._make_room(work)
        slots = self._tables.slots(work)
        for sequence, count in work:
            sequence.length += count
        return slots

    def extend(self, work: Work) -> None:
        """`append` for those who compute slots from the tables themselves, on the device."""
        self._make_room(work)
        for sequence, count in work:
            sequence.length += count

    def commit(
        self, sequence: Sequence, tokens: Iterable[int] | None = None, *, length: int | None = None
    ) -> None:
        """Say that the KV of appended tokens is good, and which further tokens are known now.

        `length`: the first so many tokens are good, by default all; the others are still being computed.
        Full blocks whose tokens are known enter the prefix index and can be reused from here on.
        Blocks of sliding-window groups that no later token sees are given back.

        Raises:
            RequestError: an id that is no whole number of 0 to 2**32 - 1; nothing changed.
        """
        self._register.check_ready(sequence)
        if tokens is not None:
            sequence.tokens.extend(token_array(tokens))
        sequence.committed = sequence.length if length is None else length
        if sequence.indexing:
            self.prefixes.publish(sequence)
        self._tables.release_unseen(sequence)
        if self.blocks.events.active:
            self.blocks.events.deliver()

    def commit_each(self, work: Iterable[tuple[Sequence, int, int]], *, known: bool = True) -> None:
        """`commit` for many: (sequence, next token, tokens that are good) each.

        `known=False`: the tokens are not looked at, as without them in `commit`.

        Raises:
            RequestError: a token is no whole number of 0 to 2**32 - 1; those before it are committed.
        """
        register, size, lag = self._register, self.block_size, self.blocks.lag
        slides = any(window is not None for window in self.blocks.windows)
        for sequence, token, length in work:
            if not sequence.ready or sequence not in register:
                register.check_ready(sequence)
            if known:
                try:
                    sequence.tokens.append(token)
                except (OverflowError, TypeError):
                    token_array((token,))
                    raise
            sequence.committed = length
            if (length - lag) // size > sequence.depth and sequence.indexing:
                self.prefixes.publish(sequence)
            if slides:
                self._tables.release_unseen(sequence)
        if self.blocks.events.active:
            self.blocks.events.deliver()

    def fork(self, sequence: Sequence) -> Sequence:
        """A second sequence with the same tokens; all blocks are shared until one of them writes.

        Raises:
            ConfigError: tokens were appended and not committed, or the sequence is swapped out.
        """
        self._register.check_committed(sequence, "fork")
        twin = self.new_sequence(tenant=sequence.tenant)
        self._tables.share_all(sequence, twin)
        return twin

    def can_truncate(self, sequence: Sequence, length: int) -> bool:
        """True if `truncate` can end the sequence there. Changes nothing."""
        self._register.check_ready(sequence)
        return length == sequence.length or self._tables.can_shorten(sequence, length)

    def truncate(self, sequence: Sequence, length: int, *, state_is_due: bool = False) -> None:
        """End a sequence after its first `length` tokens: rejected drafts, or a rewind.

        A recurrent state goes back only to a snapshot, or over the last append if that was not run.
        `state_is_due`: also within the last block of the last append, where the state after `length` tokens,
        and no later one, is stored or will be.

        Raises:
            ConfigError: longer than the sequence, or back to where a sliding-window group gave
                back blocks that would be seen again; nothing changed.
        """
        self._register.check_ready(sequence)
        self._tables.shorten(sequence, length, state_is_due=state_is_due)
        if len(sequence.tokens) > length:
            self.prefixes.withdraw(sequence)
            del sequence.tokens[length:]

    def scrub(self, sequence: Sequence) -> None:
        """Queue zeroing of every block that only this sequence uses; it is never indexed again.

        What it computed itself and nobody else uses leaves the index too; pins on that end.
        """
        self._register.check_ready(sequence)
        sequence.indexing = False
        self.prefixes.withdraw(sequence)
        self.pins.release_own(sequence)
        self.blocks.unpublish(sequence)
        self._tables.scrub(sequence)
        self.blocks.events.deliver()

    def scrub_uncommitted(self, sequence: Sequence) -> None:
        """Queue zeroing of the blocks with tokens that were not committed, of a sequence that ends now.

        A step may still be computing them, and nobody will look whether they are finite.
        """
        self._register.check_ready(sequence)
        if sequence.length > sequence.committed:
            self._tables.scrub(sequence, first=sequence.committed // self.block_size)

    def free(self, sequence: Sequence) -> BlockUse:
        """End a sequence and give back what it holds. Indexed blocks stay cached."""
        self._register.check_live(sequence)
        self._end(sequence)
        return replace(sequence.receipt)

    def can_swap_out(self, sequence: Sequence) -> bool:
        """True if host slots are free for all of a sequence's blocks. Changes nothing."""
        self._register.check_committed(sequence, "swap out")
        return self.swap.can_swap_out(sequence)

    def swap_out(self, sequence: Sequence) -> None:
        """Queue the move of a sequence's blocks to host slots and release them.

        Raises:
            OutOfBlocks: too few host slots; nothing changed.
            ConfigError: tokens were appended and not committed.
        """
        self._register.check_committed(sequence, "swap out")
        self.swap.swap_out(sequence)
        sequence.ready = False
        self.prefixes.withdraw(sequence)
        self.blocks.events.deliver()

    def can_swap_in(self, sequence: Sequence) -> bool:
        """True if blocks are there for `swap_in`. Changes nothing."""
        self._register.check_swapped(sequence)
        return self.swap.can_swap_in(sequence)

    def swap_in(self, sequence: Sequence) -> None:
        """Bring a sequence back: what the index still holds is shared, the rest is ordered in.

        Its bytes are not trusted yet: carry out the orders, then call `recover`, whether or not any
        failed. Until then the sequence can only be freed.

        Raises:
            OutOfBlocks: too few blocks; the sequence stays swapped out.
            ConfigError: the sequence is not swapped out.
        """
        self._register.check_swapped(sequence)
        self.swap.swap_in(sequence)
        sequence.ready = False
        self.blocks.events.deliver()

    def recover(self, sequence: Sequence, failed: Iterable[SwapIn]) -> None:
        """Go on after a swap-in: `failed` are the orders whose bytes were not what went out, if any.

        The sequence is shortened to what is good. Its tokens stay known: compute from
        `sequence.length` on. Orders of other sequences are passed over.

        Raises:
            ConfigError: the sequence was not just swapped in, or its orders were not taken yet.
        """
        self._register.check_restored(sequence)
        if any(isinstance(order, SwapIn) for order in self.blocks.orders):
            raise ConfigError("swap-ins were ordered and not carried out; take_orders() first")
        sequence.ready = True
        lost = self.swap.lost(sequence, failed)
        if lost is not None:
            before = sequence.length
            length = min(lost * self.block_size, before)
            self._tables.shorten(sequence, length if self._tables.can_shorten(sequence, length) else 0)
            sequence.receipt.recomputed += before - sequence.length

    def utilization(self) -> float:
        """Tokens held / slots of live blocks, over all layer groups; 1.0 when nothing is live."""
        return self._tables.utilization(self.sequences())

    def check_integrity(self) -> None:
        """Raise AssertionError, naming it, if any invariant of docs/blocks.md is broken."""
        check_integrity(self.blocks, self.sequences(), self.pins, self.swap, self.prefixes.computing())

    def _make_room(self, work: Work) -> None:
        self._register.check_work(work)
        self._tables.make_room(work)
        if self.blocks.events.active:
            self.blocks.events.deliver()

    def _begin(self, prompt: PrefixQuery) -> Sequence:
        check_prompt(self.blocks, prompt)
        sequence = self.new_sequence(tenant=prompt.tenant)
        sequence.node = self.blocks.index.root(prompt.root)
        sequence.tokens = prompt.tokens[:]
        sequence.digests = prompt.digests
        sequence.tail = (len(prompt.tokens) - 1) // self.block_size - 1
        return sequence

    def _end(self, sequence: Sequence) -> None:
        """Release everything of a sequence, deepest blocks first."""
        self.prefixes.withdraw(sequence)
        if sequence.is_swapped:
            self.swap.discard(sequence)
        self.blocks.release(sequence.held)
        sequence.tables, sequence.starts = [[] for _ in self.pools], [0] * len(self.pools)
        sequence.length = sequence.committed = 0
        self._register.remove(sequence)
