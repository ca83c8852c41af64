"""Block manager: sequences over shared blocks, from the first token to the last release."""

from collections.abc import Callable, Iterable
from typing import Unpack

from kvq.blockmgr.blocks import Blocks
from kvq.blockmgr.events import Order, Subscriber, SwapIn
from kvq.blockmgr.hits import Match, Prefixes
from kvq.blockmgr.integrity import check_integrity
from kvq.blockmgr.pins import Pins
from kvq.blockmgr.pool import BlockId, BlockPool, PoolUsage
from kvq.blockmgr.prefix import PrefixQuery, token_array
from kvq.blockmgr.sequence import BlockUse, LiveSequences, Sequence, Work
from kvq.blockmgr.swap import SwapSpace
from kvq.blockmgr.tables import Tables
from kvq.errors import ConfigError
from kvq.layout import Holding


class BlockManager:  # D61: one class of parts; methods that only forward stay, since callers name them
    """Decides which block holds what: allocation, sharing, copy-on-write, prefix reuse, swapping.

    It owns no bytes. Changes of bytes are queued as orders, which `take_orders` returns
    and `kvq.cache` carries out before the step's writes. All calls come from one thread.

        prompt = manager.prompt(token_ids, tenant="a")
        sequence = manager.start(prompt)              # hits are shared; sequence.length is reused
        slots = manager.append([(sequence, 5)])       # where the next tokens' K and V go
        cache.carry_out(manager.take_orders())        # then run the step
        manager.commit(sequence, [sampled_token])     # its KV is good: others may reuse it
        receipt = manager.free(sequence)
    """

    def __init__(
        self,
        *,
        num_blocks: list[int],
        block_size: int,
        host_slots: list[int] | None = None,
        reserve_blocks: int = 0,
        max_pinned_blocks: int | None = None,
        identity: bytes = b"",
        **options: Unpack[Holding],
    ) -> None:
        """Make empty pools. All lists have one entry per layer group.

        `block_size` is in tokens. `reserve_blocks` of every pool are kept from new sequences, so that
        running ones can grow. At most `max_pinned_blocks` of every pool may be pinned, by default half.
        `identity` names the model and the recipe: prefixes of another identity never match. `options`:
        see `Holding`. Raises ConfigError for numbers out of range and lists of other lengths.
        """
        self.blocks = Blocks(num_blocks, block_size, identity, **options)
        if not 0 <= reserve_blocks < min(num_blocks):
            raise ConfigError(
                f"reserve_blocks must be at least 0 and less than every pool's {num_blocks} blocks, got "
                f"{reserve_blocks}"
            )
        self.pools: list[BlockPool] = self.blocks.pools  # by layer group; for reading
        self.block_size = block_size
        self.reserve_blocks = reserve_blocks
        self.swap = SwapSpace(self.blocks, list(host_slots or [0] * len(num_blocks)))
        self.pins = Pins(self.blocks, max_pinned_blocks)
        self.prefixes = Prefixes(self.blocks)
        self._tables = Tables(self.blocks)
        self._live = LiveSequences()

    def prompt(
        self,
        tokens: Iterable[int],
        *,
        tenant: str = "",
        shared_salt: str | None = None,
        cache_salt: str | None = None,
        max_reuse: int | None = None,
    ) -> PrefixQuery:
        """Prepare a prompt for `lookup` and `start`; keep it, so that its tokens are hashed only once.

        Prefixes are found among prompts of the same tenant, or of any tenant with the same `shared_salt`,
        and of these only among prompts with the same `cache_salt`. `max_reuse`: most tokens to reuse;
        prompt log-probabilities need all of them computed.

        Raises:
            RequestError: an id that is no whole number of 0 to 2**32 - 1.
        """
        ids, index = token_array(tokens), self.blocks.index
        root = index.root_digest(tenant, shared_salt, cache_salt)
        return PrefixQuery(ids, tenant, root, ids.tobytes(), [], self.block_size, max_reuse)

    def lookup(self, prompt: PrefixQuery) -> Match:  # D75: nothing reused is `max_reuse=0`
        """Return how many tokens `start` would reuse, and the sequence to wait for. Changes nothing."""
        return self.prefixes.match(prompt)

    def held_prefix(self, prompt: PrefixQuery) -> tuple[int, list[int], list[list[BlockId]]]:
        """Return the longest hit in whole blocks: (length, starts, tables per group). Changes nothing."""
        return self.prefixes.held(prompt)

    def can_admit(self, prompt: PrefixQuery, count: int, *, spare: list[int] | None = None) -> bool:
        """True if a sequence could start and append `count` tokens beyond its hit now.

        `spare`: blocks per layer group to be left over, by default the reserve. Changes nothing.
        """
        return self.prefixes.can_start(prompt, count, spare=spare or [self.reserve_blocks] * len(self.pools))

    def pin(self, prompt: PrefixQuery, until: float) -> int:
        """Keep the indexed whole blocks of a prompt until a time on the caller's clock, in seconds.

        Pinning the same prefix again extends the pin. Returns the tokens pinned, maybe 0.

        Raises:
            OutOfBlocks: pins would hold more than their limit; nothing changed.
            ConfigError: `until` is not a finite number.
        """
        return self.pins.add(self.prefixes.whole(prompt), until)

    def expire(self, now: float) -> int:
        """Release the pins that ended at or before `now`. Returns how many."""
        return self.pins.expire(now)

    def release_pin(self) -> bool:
        """Release the pin that ends first, to make room. Returns False if there is none."""
        return self.pins.release_first()

    def take_orders(self) -> list[Order]:
        """Return every order queued since the last call, in order, each exactly once."""
        return self.blocks.take_orders()

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call `subscriber` with every event from now on. Returns a function that ends it."""
        return self.blocks.events.subscribe(subscriber)

    def usage(self) -> list[PoolUsage]:
        """Return free, cached and live blocks per layer group."""
        return [pool.usage() for pool in self.pools]

    def utilization(self) -> float:
        """Return tokens held / slots of live blocks, over all layer groups; 1.0 when nothing is live."""
        return self._tables.utilization(self.sequences())

    def drop_cached(self) -> None:
        """Evict every cached block. Live and pinned ones stay."""
        for pool in self.pools:
            pool.drop_cached()
        self.blocks.events.deliver()

    def grow(self, num_blocks: list[int]) -> None:
        """Enlarge the pools; present blocks keep their ids. Raises ConfigError if a pool would shrink."""
        self.blocks.grow(num_blocks)

    def check_integrity(self) -> None:
        """Raise AssertionError, naming it, if any invariant of docs/blocks.md is broken."""
        check_integrity(self.blocks, self.sequences(), self.pins, self.swap, self.prefixes.computing())

    def sequences(self) -> list[Sequence]:
        """Return all live sequences, swapped ones included, in order of their start."""
        return list(self._live)

    def new_sequence(self, *, tenant: str = "") -> Sequence:
        """Start an empty sequence without looking for a prefix; it holds no blocks yet."""
        sequence = Sequence(
            tables=[[] for _ in self.pools],
            starts=[0] * len(self.pools),
            node=self.blocks.index.root(self.blocks.index.root_digest(tenant)),
            tenant=tenant,
            state_group=-1 if self.blocks.states is None else self.blocks.states.group,
        )
        self._live[sequence] = None
        return sequence

    def start(self, prompt: PrefixQuery) -> Sequence:
        """Start a sequence from the longest prefix hit; `length` is what need not be computed.

        At least one token of the prompt is left to compute. A block that matches only in its first
        tokens is copied, if a block is free for it.
        """
        hit = self.prefixes.hit(prompt)
        sequence = self._begin(prompt)
        self._tables.fill(sequence, hit)
        self.prefixes.announce(sequence, prompt)
        self.blocks.events.deliver()
        return sequence

    def adopt(self, prompt: PrefixQuery, length: int) -> Sequence:  # D78: all that is adopted is old enough
        """Start a sequence whose first `length` tokens will be filled in, not computed.

        Full-attention groups get blocks for all of them, groups with a limit for those below it, sliding
        windows for the last ones. Fill every block of `tables[g][starts[g]:]`, then `commit`, which indexes
        all of them, with a lag too; without it, `free` leaves nothing.

        Raises:
            ConfigError: `length` is no multiple of the block size, or beyond the prompt.
            OutOfBlocks: too few blocks; nothing changed.
        """
        starts, taken = self._tables.take_prefix(prompt, length)
        sequence = self._begin(prompt)
        sequence.adopt(length, starts, taken, self.blocks.block_bytes)
        self.prefixes.announce(sequence, prompt)
        self.blocks.events.deliver()
        return sequence

    def can_append(self, work: Work) -> bool:
        """True if the pools have blocks for `append(work)`. Changes nothing."""
        self._live.check_work(work)
        return self._tables.can_take(self._tables.fitting(work)[0])

    def append(self, work: Work) -> list[list[int]]:
        """Make room for new tokens: (sequence, count) each. Returns their slots per layer group.

        All or nothing over all sequences and groups. Queues a copy of a last block that is shared, by a fork
        or the index. Slots beyond a group's limit are -1. Recurrent states have none: see `Sequence.move`.

        Raises:
            OutOfBlocks: a pool has too few blocks; nothing changed.
            ConfigError: a negative count, a sequence twice, or one that can't be used now.
        """
        self.extend(work)
        return self._tables.slots(work)

    def extend(self, work: Work) -> None:  # D55: lists no slots: 0.5 us for 16
        """Make room as `append` does, for callers that compute slots from the tables on the device."""
        self._live.check_work(work)
        self._tables.make_room(work)
        if self.blocks.events.active:
            self.blocks.events.deliver()
        for sequence, count in work:
            sequence.length += count

    def commit(self, sequence: Sequence, tokens: Iterable[int] | None = None) -> None:
        """Declare the KV of appended tokens good, and add the further tokens that are known now.

        Full blocks whose tokens are known enter the prefix index and can be reused from here on.
        Blocks of sliding-window groups that no later token sees are given back.

        Raises:
            RequestError: an id that is no whole number of 0 to 2**32 - 1; nothing changed.
        """
        self._live.check_ready(sequence)
        if tokens is not None:
            sequence.tokens.extend(token_array(tokens))
        sequence.committed = sequence.length
        if sequence.indexing:
            self.prefixes.publish(sequence)
        self._tables.release_unseen(sequence)
        if self.blocks.events.active:
            self.blocks.events.deliver()

    def commit_each(self, work: Iterable[tuple[Sequence, int, int]], *, known: bool = True) -> None:
        """Commit many sequences: (sequence, next token, tokens that are good) each.

        `known=False`: the tokens are not looked at, as without them in `commit`.

        Raises:
            RequestError: a token is no whole number of 0 to 2**32 - 1; those before it are committed.
        """
        live, size, lag = self._live, self.block_size, self.blocks.lag
        slides = any(window is not None for window in self.blocks.windows)
        for sequence, token, length in work:
            if not sequence.ready or sequence not in live:
                live.check_ready(sequence)
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
        """Start a second sequence with the same tokens; all blocks are shared until one of them writes.

        Raises:
            ConfigError: tokens were appended and not committed, or the sequence is swapped out.
        """
        self._live.check_committed(sequence, "fork")
        fork = self.new_sequence(tenant=sequence.tenant)
        self._tables.share_all(sequence, fork)
        return fork

    def can_truncate(self, sequence: Sequence, length: int) -> bool:
        """True if `truncate` can end the sequence there. Changes nothing."""
        self._live.check_ready(sequence)
        return length == sequence.length or self._tables.can_shorten(sequence, length)

    def truncate(self, sequence: Sequence, length: int, *, state_is_due: bool = False) -> None:
        """End a sequence after its first `length` tokens: rejected drafts, or a rewind.

        A recurrent state goes back only to a snapshot, or over the last append if that was not run.
        `state_is_due`: also within the last block of the last append, where the state after `length` tokens,
        and no later one, is stored or will be.

        Raises:
            ConfigError: longer than the sequence, or blocks seen there were given back; nothing changed.
        """
        self._live.check_ready(sequence)
        self._tables.shorten(sequence, length, state_is_due=state_is_due)
        if len(sequence.tokens) > length:
            self.prefixes.withdraw(sequence)
            del sequence.tokens[length:]

    def scrub(self, sequence: Sequence) -> None:  # D60: a failed request's own blocks leave the index
        """Queue zeroing of every block that only this sequence uses; it is never indexed again.

        Blocks that it computed and no other sequence uses leave the index too; pins on them end.
        """
        self._live.check_ready(sequence)
        sequence.indexing = False
        self.prefixes.withdraw(sequence)
        self.pins.release_own(sequence)
        self.prefixes.unpublish(sequence)
        self._tables.scrub(sequence)
        self.blocks.events.deliver()

    def scrub_uncommitted(self, sequence: Sequence) -> None:
        """Queue zeroing of a sequence's blocks with uncommitted tokens, before it ends within a step."""
        self._live.check_ready(sequence)
        if sequence.length > sequence.committed:
            self._tables.scrub(sequence, first=sequence.committed // self.block_size)

    def free(self, sequence: Sequence) -> BlockUse:
        """End a sequence and release its blocks, deepest first. Indexed blocks stay cached."""
        self._live.check_live(sequence)
        self.prefixes.withdraw(sequence)
        if sequence.is_swapped:
            self.swap.discard(sequence)
        self.blocks.release(sequence.held)
        sequence.tables, sequence.starts = [[] for _ in self.pools], [0] * len(self.pools)
        sequence.length = sequence.committed = 0
        self._live.remove(sequence)
        return sequence.receipt.copy()

    def can_swap_out(self, sequence: Sequence) -> bool:
        """True if host slots are free for all of a sequence's blocks. Changes nothing."""
        self._live.check_committed(sequence, "swap out")
        return self.swap.can_swap_out(sequence)

    def swap_out(self, sequence: Sequence) -> None:
        """Queue the move of a sequence's blocks to host slots and release them.

        Raises:
            OutOfBlocks: too few host slots; nothing changed.
            ConfigError: tokens were appended and not committed.
        """
        self._live.check_committed(sequence, "swap out")
        self.swap.swap_out(sequence)
        self.prefixes.withdraw(sequence)
        self.blocks.events.deliver()

    def can_swap_in(self, sequence: Sequence) -> bool:
        """True if the pools have blocks for `swap_in`. Changes nothing."""
        self._live.check_swapped(sequence)
        return self.swap.can_swap_in(sequence)

    def swap_in(self, sequence: Sequence) -> None:
        """Bring a sequence back: blocks that the index still holds are shared, the rest is ordered in.

        Carry out the orders, then call `recover`, even if none failed; until then it can only be freed.

        Raises:
            OutOfBlocks: too few blocks; the sequence stays swapped out.
            ConfigError: the sequence is not swapped out.
        """
        self._live.check_swapped(sequence)
        self.swap.swap_in(sequence)
        self.blocks.events.deliver()

    def recover(self, sequence: Sequence, failed: Iterable[SwapIn]) -> None:
        """Confirm a swap-in: `failed` are the orders whose bytes were not what went out, if any.

        The sequence is shortened to what is good. Its tokens stay known: compute from `sequence.length`
        on. Orders of other sequences are ignored.

        Raises:
            ConfigError: the sequence was not just swapped in, or its orders were not taken yet.
        """
        self._live.check_restored(sequence)
        lost = self.swap.lost(sequence, failed)
        sequence.ready = True
        if lost is not None:
            self._tables.drop_lost(sequence, lost)

    def _begin(self, prompt: PrefixQuery) -> Sequence:
        sequence = self.new_sequence(tenant=prompt.tenant)
        sequence.node = self.blocks.index.root(prompt.root)
        sequence.tokens = prompt.tokens[:]
        sequence.digests = prompt.digests
        sequence.tail = (len(prompt.tokens) - 1) // self.block_size - 1
        return sequence
