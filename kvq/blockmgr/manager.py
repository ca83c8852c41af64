"""Block manager: the block memory of sequences, from the first token until they are freed."""

from collections.abc import Callable, Iterable
from typing import Unpack

from kvq.blockmgr.blocks import Blocks
from kvq.blockmgr.events import Order, Subscriber
from kvq.blockmgr.hits import Match, Prefixes
from kvq.blockmgr.integrity import check_integrity
from kvq.blockmgr.pins import Pins
from kvq.blockmgr.pool import BlockPool, PoolUsage
from kvq.blockmgr.prefix import PrefixQuery, tagged, token_array
from kvq.blockmgr.restore import Below
from kvq.blockmgr.sequence import BlockUse, LiveSequences, Sequence, Work
from kvq.blockmgr.tables import Tables
from kvq.errors import ConfigError
from kvq.layout import Holding


class BlockManager:  # D61: one class made of parts; forwarding methods stay, since callers name them
    """Manager of block contents. It handles allocation, sharing, copy-on-write and prefix reuse.

    The manager owns no bytes. Changes to bytes are queued as orders, which `take_orders` returns and
    `kvq.cache` carries out before the step's writes. All calls must come from one thread.

        prompt = manager.prompt(token_ids, tenant="a")
        sequence = manager.start(prompt)              # hits are shared; sequence.length tokens are reused
        slots = manager.append([(sequence, 5)])       # slots for the K and V of the next tokens
        cache.carry_out(manager.take_orders())        # then run the step
        manager.commit(sequence, [sampled_token])     # its KV is valid: other sequences may reuse it
        receipt = manager.free(sequence)
    """

    def __init__(
        self,
        *,
        num_blocks: list[int],
        block_size: int,
        reserve_blocks: int = 0,
        max_pinned_blocks: int | None = None,
        identity: bytes = b"",
        **options: Unpack[Holding],
    ) -> None:
        """Create empty pools. Every list has one entry per layer group.

        `block_size` is in tokens. In every pool, `reserve_blocks` are withheld from new sequences, so that
        running sequences can grow. At most `max_pinned_blocks` of each pool may be pinned, by default half.
        `identity` names the model and the recipe; prefixes with another identity never match. `options`: see
        `Holding`. Raises ConfigError if a number is out of range or a list has the wrong length.
        """
        self.blocks = Blocks(num_blocks, block_size, identity, **options)
        if not 0 <= reserve_blocks < min(num_blocks):
            raise ConfigError(
                f"reserve_blocks must be at least 0 and less than every pool's {num_blocks} blocks, got "
                f"{reserve_blocks}"
            )
        self.pools: list[BlockPool] = self.blocks.pools  # by layer group; read-only for callers
        self.block_size = block_size
        self.reserve_blocks = reserve_blocks
        self.misses = self.blocks.misses  # explains why a started sequence reuses no more
        self.pins = Pins(self.blocks, max_pinned_blocks)
        self.prefixes = Prefixes(self.blocks)
        self._tables = Tables(self.blocks)
        self._live = LiveSequences()
        self.below = Below(self._tables, self.prefixes, self._begin, self.commit, self.free)

    def prompt(
        self,
        tokens: Iterable[int],
        *,
        tenant: str = "",
        shared_salt: str | None = None,
        cache_salt: str | None = None,
        max_reuse: int | None = None,
    ) -> PrefixQuery:
        """Prepare a prompt for `lookup` and `start`. Keep the result, so that tokens are hashed only once.

        Prefixes are shared among prompts of the same tenant, or of all tenants with the same `shared_salt`.
        Among these prompts, prefixes are shared only if the `cache_salt` is also the same. `max_reuse`:
        maximum number of tokens to reuse; a limit is needed for prompt log-probabilities, whose tokens must
        be computed. Tokens may be tagged; those that follow get the tag of the last one.

        Raises:
            RequestError: an id is not a whole number from 0 to 2**32 - 1.
        """
        ids, index = token_array(tokens), self.blocks.index
        root = index.root_digest(tenant, shared_salt, cache_salt)
        if self.blocks.tiers is not None:
            self.blocks.tiers.learn(root, f"t{tenant}" if shared_salt is None else f"s{shared_salt}")
        return PrefixQuery(ids, tenant, root, ids.tobytes(), [], self.block_size, max_reuse)

    def tag(self, digest: bytes) -> int:
        """Return the tag of an adapter for its tokens; see `PrefixIndex.tag`."""
        return self.blocks.index.tag(digest)

    def lookup(self, prompt: PrefixQuery) -> Match:  # D75: `max_reuse=0` disables reuse
        """Return how many tokens `start` would reuse, and which sequence to wait for. Changes nothing."""
        return self.prefixes.match(prompt)

    def can_admit(self, prompt: PrefixQuery, count: int, *, spare: list[int] | None = None) -> bool:
        """Return True if a sequence could start now and append `count` tokens after its prefix hit.

        `spare`: number of blocks per layer group that must stay free; the reserve by default. Changes
        nothing.
        """
        return self.prefixes.can_start(prompt, count, spare=spare or [self.reserve_blocks] * len(self.pools))

    def pin(self, prompt: PrefixQuery, until: float) -> int:
        """Pin the complete indexed blocks of a prompt until `until`, in seconds on the caller's clock.

        Pinning the same prefix again extends the pin. Returns the number of pinned tokens, which may be 0.
        At the limit, pins of the tenants with most blocks make room for a tenant within its share of it.

        Raises:
            OutOfBlocks: the pins would exceed their limit, and the tenant's its share; nothing was changed.
            ConfigError: `until` is not a finite number.
        """
        return self.pins.add(self.prefixes.whole(prompt), until, (prompt.tenant, None))

    def expire(self, now: float) -> int:
        """Release the pins that expired at or before `now`, and return their number."""
        return self.pins.expire(now)

    def take_orders(self) -> list[Order]:
        """Return all orders queued since the last call, each exactly once, in the order of queueing."""
        return self.blocks.take_orders()

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call `subscriber` with every event from now on. Returns a function that unsubscribes."""
        return self.blocks.events.subscribe(subscriber)

    def usage(self) -> list[PoolUsage]:
        """Return the number of free, cached and live blocks of each layer group."""
        return [pool.usage() for pool in self.pools]

    def utilization(self) -> float:
        """Return tokens held / slots of live blocks, over all layer groups, or 1.0 if no block is live."""
        return self._tables.utilization(self.sequences())

    def drop_cached(self) -> None:
        """Evict every cached block; the tiers don't get them. Live and pinned blocks stay."""
        with self.blocks.discarding():
            for pool in self.pools:
                pool.drop_cached()
        self.blocks.events.deliver()

    def grow(self, num_blocks: list[int]) -> None:
        """Enlarge the pools. Existing blocks keep their ids. Raise ConfigError if a pool would shrink."""
        self.blocks.grow(num_blocks)

    def check_integrity(self) -> None:
        """Raise AssertionError, naming the invariant, if an invariant in docs/blocks.md is violated."""
        check_integrity(self.blocks, self.sequences(), self.pins, self.prefixes.computing())

    def sequences(self) -> list[Sequence]:
        """Return all live sequences, in the order in which they were started."""
        return list(self._live)

    def new_sequence(self, *, tenant: str = "") -> Sequence:
        """Start an empty sequence, without blocks and without a prefix lookup."""
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
        """Start a sequence from its longest prefix hit. Its first `length` tokens need not be computed.

        At least one token of the prompt is left to compute. If only the first tokens of a block match, the
        block is copied, provided that a block is free for the copy.
        """
        hit = self.prefixes.hit(prompt)
        sequence = self._begin(prompt)
        self._tables.fill(sequence, hit)
        self.prefixes.announce(sequence, prompt)
        self.blocks.events.deliver()
        return sequence

    def adopt(self, prompt: PrefixQuery, length: int) -> Sequence:  # D78: adopted blocks are old enough
        """Start a sequence whose first `length` tokens will be filled in instead of computed.

        Full-attention groups get blocks for all of these tokens, groups with a limit for the tokens below the
        limit, and sliding-window groups for the last tokens. Fill every block of `tables[g][starts[g]:]`,
        then call `commit`, which indexes all these blocks even with a lag. Without `commit`, `free` leaves
        nothing cached.

        Raises:
            ConfigError: `length` is not a multiple of the block size, or exceeds the prompt.
            OutOfBlocks: there are too few blocks; nothing was changed.
        """
        starts, taken = self._tables.take_prefix(prompt, length)
        sequence = self._begin(prompt)
        sequence.adopt(length, starts, taken, self.blocks.block_bytes)
        self.prefixes.announce(sequence, prompt)
        self.blocks.events.deliver()
        return sequence

    def can_append(self, work: Work) -> bool:
        """Return True if the pools have enough blocks for `append(work)`. Changes nothing."""
        self._live.check_work(work)
        return self._tables.can_take(self._tables.fitting(work)[0])

    def append(self, work: Work) -> list[list[int]]:
        """Allocate slots for new tokens, listed as (sequence, count) pairs. Return slots by layer group.

        Either all sequences and groups get their slots, or none do. If a fork or the index shares a last
        block, a copy is queued. Slots beyond a group's limit are -1. Recurrent states have no slots: see
        `Sequence.move`.

        Raises:
            OutOfBlocks: a pool has too few blocks; nothing was changed.
            ConfigError: a count is negative, or a sequence is listed twice or can't be used now.
        """
        self.extend(work)
        return self._tables.slots(work)

    def extend(self, work: Work) -> None:  # D55: doesn't list slots, which saves 0.5 us for 16
        """Allocate like `append`, for callers that compute slots on the device from the tables."""
        self._live.check_work(work)
        self._tables.make_room(work)
        if self.blocks.events.active:
            self.blocks.events.deliver()
        for sequence, count in work:
            sequence.length += count

    def commit(self, sequence: Sequence, tokens: Iterable[int] | None = None) -> None:
        """Mark the KV of all appended tokens as valid, and add the token ids that are now known.

        Full blocks whose tokens are known enter the prefix index and can then be reused.
        Blocks of sliding-window groups that no later token can see are released.

        Raises:
            RequestError: an id is not a whole number from 0 to 2**32 - 1; nothing was changed.
        """
        self._live.check_live(sequence)
        if tokens is not None:
            sequence.tokens.extend(tagged(token_array(tokens), sequence.tag))
        sequence.committed = sequence.length
        if sequence.indexing:
            self.prefixes.publish(sequence)
        self._tables.release_unseen(sequence)
        if self.blocks.events.active:
            self.blocks.events.deliver()

    def commit_each(self, work: Iterable[tuple[Sequence, int, int]], *, known: bool = True) -> None:
        """Commit many sequences, listed as (sequence, next token, number of tokens with valid KV).

        `known=False`: the token ids are ignored, as if `commit` were called without tokens.

        Raises:
            RequestError: a token is not a whole number from 0 to 2**32 - 1; earlier sequences in `work` are
                committed.
        """
        live, size, lag = self._live, self.block_size, self.blocks.lag
        slides = any(window is not None for window in self.blocks.windows)
        for sequence, token, length in work:
            if sequence not in live:
                live.check_live(sequence)
            if known:
                try:
                    sequence.tokens.append(token | sequence.tag)
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
        """Start a second sequence with the same tokens. Blocks are shared until one sequence writes.

        Raises:
            ConfigError: appended tokens are not committed yet.
        """
        self._live.check_committed(sequence, "fork")
        fork = self.new_sequence(tenant=sequence.tenant)
        self._tables.share_all(sequence, fork)
        return fork

    def can_truncate(self, sequence: Sequence, length: int) -> bool:
        """Return True if `truncate` can shorten the sequence to `length` tokens. Changes nothing."""
        self._live.check_live(sequence)
        return length == sequence.length or self._tables.can_shorten(sequence, length)

    def truncate(self, sequence: Sequence, length: int, *, state_is_due: bool = False) -> None:
        """Shorten a sequence to its first `length` tokens, in order to drop rejected drafts or to rewind.

        A recurrent state can return only to a snapshot, or to the point before the last append if that append
        was not run.
        With `state_is_due`, the state can also return to a point within the last block of the last append if
        the state after `length` tokens, and no later state, is stored or will be stored.

        Raises:
            ConfigError: `length` is too large, or blocks visible there were released; nothing changed.
        """
        self._live.check_live(sequence)
        self._tables.shorten(sequence, length, state_is_due=state_is_due)
        if len(sequence.tokens) > length:
            self.prefixes.withdraw(sequence)
            del sequence.tokens[length:]

    def scrub(self, sequence: Sequence) -> None:  # D60: a failed request's own blocks leave the index
        """Queue zeroing of every block that only this sequence uses. The sequence is never indexed again.

        Blocks that the sequence computed and no other sequence uses leave the index; their pins are released.
        """
        self._live.check_live(sequence)
        sequence.indexing = False
        self.prefixes.withdraw(sequence)
        self.pins.release_own(sequence)
        with self.blocks.discarding():
            self.prefixes.unpublish(sequence)
        self._tables.scrub(sequence)
        self.blocks.events.deliver()

    def scrub_uncommitted(self, sequence: Sequence) -> None:
        """Queue zeroing of the blocks with uncommitted tokens of a sequence that ends within a step."""
        self._live.check_live(sequence)
        if sequence.length > sequence.committed:
            self._tables.scrub(sequence, first=sequence.committed // self.block_size)

    def free(self, sequence: Sequence) -> BlockUse:
        """End a sequence and release its blocks, deepest first. Indexed blocks stay cached."""
        self._live.check_live(sequence)
        self.prefixes.withdraw(sequence)
        self.prefixes.mark_end(sequence)
        self.blocks.release(sequence.held)
        sequence.tables, sequence.starts = [[] for _ in self.pools], [0] * len(self.pools)
        sequence.length = sequence.committed = 0
        del self._live[sequence]
        return sequence.receipt.copy()

    def _begin(self, prompt: PrefixQuery) -> Sequence:
        sequence = self.new_sequence(tenant=prompt.tenant)
        sequence.node = self.blocks.index.root(prompt.root)
        sequence.tokens = prompt.tokens[:]
        sequence.tag = self.blocks.index.tag_of(prompt.data)
        sequence.digests = prompt.digests
        sequence.tail = (len(prompt.tokens) - 1) // self.block_size - 1
        return sequence
