"""The block manager: sequences over shared blocks, from the first token to the last release."""

from bisect import bisect_left
from collections.abc import Callable, Iterable

from kvq.blockmgr.blocks import Blocks
from kvq.blockmgr.events import Subscriber
from kvq.blockmgr.ids import BlockId
from kvq.blockmgr.integrity import check_integrity
from kvq.blockmgr.matching import check_prompt, find
from kvq.blockmgr.orders import Order, SwapIn
from kvq.blockmgr.pins import Pins
from kvq.blockmgr.pool import Account, BlockPool, PoolUsage
from kvq.blockmgr.prefix import Digest, Prompt, sha256_digest, token_array
from kvq.blockmgr.prefixes import Match, Prefixes
from kvq.blockmgr.register import Register
from kvq.blockmgr.sequence import Receipt, Sequence
from kvq.blockmgr.swap import SwapSpace
from kvq.blockmgr.tables import Tables, Work
from kvq.errors import ConfigError


class BlockManager:
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

    def __init__(
        self,
        *,
        num_blocks: list[int],
        block_size: int,
        windows: list[int | None] | None = None,
        host_slots: list[int] | None = None,
        reserve_blocks: int = 0,
        max_pinned_blocks: int | None = None,
        identity: bytes = b"",
        digest: Digest = sha256_digest,
    ) -> None:
        """One entry of `num_blocks`, `windows` and `host_slots` per layer group.

        `block_size` is in tokens; a window of None means full attention. `reserve_blocks` of every
        pool are kept from new sequences, so that running ones can grow. `max_pinned_blocks` of
        every pool may be pinned, by default half. `identity` names the model and the recipe:
        prefixes of another identity never match.

        Raises:
            ConfigError: a number out of range, or lists of different lengths.
        """
        self.blocks = Blocks(
            num_blocks=num_blocks,
            block_size=block_size,
            windows=[None] * len(num_blocks) if windows is None else list(windows),
            identity=identity,
            digest=digest,
        )
        if not 0 <= reserve_blocks < min(num_blocks):
            raise ConfigError(
                f"reserve_blocks must be at least 0 and less than every pool's {num_blocks} blocks, got "
                f"{reserve_blocks}"
            )
        self.block_size = block_size
        self.reserve_blocks = reserve_blocks
        self.swap = SwapSpace(self.blocks, list(host_slots or [0] * len(num_blocks)))
        self.pins = Pins(self.blocks, max_pinned_blocks)
        self.prefixes = Prefixes(self.blocks)
        self._tables = Tables(self.blocks)
        self._accounts: dict[str, list[Account]] = {}
        self._register = Register()

    @property
    def pools(self) -> list[BlockPool]:
        """The pools by layer group; for reading."""
        return self.blocks.pools

    def sequences(self) -> list[Sequence]:
        """All live sequences, swapped ones included, in order of their start."""
        return list(self._register)

    def prompt(
        self,
        tokens: Iterable[int],
        *,
        tenant: str = "",
        shared_salt: str | None = None,
        cache_salt: str | None = None,
        max_reuse: int | None = None,
    ) -> Prompt:
        """Prepare a prompt for `lookup` and `start`; hold on to it to hash its tokens only once.

        Prefixes are found among the same tenant's prompts only, or, with `shared_salt`, among all
        prompts that named the same salt, whoever sent them; with `cache_salt`, only among those of them that
        named the same one. `max_reuse`: take at most so many tokens
        from them, because those after it shall be computed.

        Raises:
            RequestError: an id that is no whole number of 0 to 2**32 - 1.
        """
        prompt = self.blocks.index.prompt(
            tokens, tenant=tenant, shared_salt=shared_salt, cache_salt=cache_salt
        )
        prompt.max_reuse = max_reuse
        return prompt

    def lookup(self, prompt: Prompt) -> Match:
        """How many tokens `start` would reuse, and who is computing the next ones. Changes nothing."""
        return self.prefixes.match(prompt)

    def held_prefix(self, prompt: Prompt) -> tuple[int, list[int], list[list[BlockId]]]:
        """The longest hit in whole blocks: (length, starts, tables per group). Changes nothing."""
        hit = find(self.blocks, prompt, len(prompt.tokens))
        length = len(hit.nodes) * self.block_size
        return length, *self.prefixes.tables(hit, length)

    def can_admit(self, prompt: Prompt, count: int, *, spare: list[int] | None = None) -> bool:
        """True if a sequence could start and append `count` tokens beyond its hit now.

        `spare`: blocks per layer group to be left over, by default the reserve. Changes nothing.
        """
        accounts = self._accounts.get(prompt.tenant)
        if spare is None:
            spare = [self.reserve_blocks] * len(self.pools)
        return self.prefixes.can_start(prompt, count, accounts, spare=spare)

    def can_admit_without_reuse(self, prompt: Prompt, count: int, *, spare: list[int] | None = None) -> bool:
        """`can_admit` for a sequence that shares nothing and appends its first `count` tokens."""
        accounts = self._accounts.get(prompt.tenant)
        need = -(-count // self.block_size)
        return self.blocks.can_take(
            [[(need, accounts[group] if accounts else None)] for group in range(len(self.pools))],
            beside=[[] for _ in self.pools],
            spare=[self.reserve_blocks] * len(self.pools) if spare is None else spare,
        )

    def new_sequence(self, *, tenant: str = "") -> Sequence:
        """Start an empty sequence without looking for a prefix; it holds no blocks yet."""
        sequence = Sequence(
            tables=[[] for _ in self.pools],
            starts=[0] * len(self.pools),
            node=self.blocks.index.root(self.blocks.index.root_digest(tenant)),
            tenant=tenant,
            accounts=self._accounts.get(tenant),
        )
        self._register.add(sequence)
        return sequence

    def start(self, prompt: Prompt) -> Sequence:
        """Start a sequence from the longest prefix hit; `length` is what need not be computed.

        At least one token of the prompt is left to compute. A block that matches only in its first
        tokens is copied, if a block is free for it.
        """
        sequence = self._begin(prompt)
        self.prefixes.fill(sequence, prompt)
        self.prefixes.announce(sequence, prompt)
        self.blocks.events.deliver()
        return sequence

    def start_without_reuse(self, prompt: Prompt) -> Sequence:
        """Start a sequence that computes its whole prompt, as prompt log-probabilities need."""
        sequence = self._begin(prompt)
        self.prefixes.announce(sequence, prompt)
        return sequence

    def adopt(self, prompt: Prompt, length: int) -> Sequence:
        """Start a sequence whose first `length` tokens will be filled in, not computed.

        Full-attention groups get blocks for all of it, sliding-window groups for the last window.
        Fill every block of `tables[g][starts[g]:]`, then `commit`; without it, `free` leaves nothing.

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
        demand = self._tables.demand(self._tables.plan(work))
        return self.blocks.can_take(demand, beside=[[] for _ in demand])

    def append(self, work: Work) -> list[list[int]]:
        """Make room for new tokens: (sequence, count) each. Return their slots per layer group.

        All or nothing over all sequences and groups. A last block that somebody else sees too, a
        fork or the index, is copied first: the order is queued, exactly once.

        Raises:
            OutOfBlocks: a pool or a quota has too few blocks; nothing changed.
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
            self._publish(sequence)
        self._tables.release_unseen(sequence)
        if self.blocks.events.active:
            self.blocks.events.deliver()

    def commit_each(self, work: Iterable[tuple[Sequence, int, int]], *, known: bool = True) -> None:
        """`commit` for many: (sequence, next token, tokens that are good) each.

        `known=False`: the tokens are not looked at, as without them in `commit`.

        Raises:
            RequestError: a token is no whole number of 0 to 2**32 - 1; those before it are committed.
        """
        register, size = self._register, self.block_size
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
            if length // size > sequence.depth and sequence.indexing:
                self._publish(sequence)
            if slides:
                self._tables.release_unseen(sequence)
        if self.blocks.events.active:
            self.blocks.events.deliver()

    def _publish(self, sequence: Sequence) -> None:
        """Index the full blocks whose tokens are known and whose KV is good."""
        if min(sequence.committed, len(sequence.tokens)) // self.block_size > sequence.depth:
            sequence.indexing = self.blocks.publish(sequence)
            self.prefixes.withdraw(sequence, sequence.depth if sequence.indexing else None)

    def leads(self, sequence: Sequence) -> bool:
        """True if no indexed block begins as the next one to index of this sequence does: it will be new."""
        node, at = sequence.node, sequence.depth * self.block_size
        if not sequence.indexing or (node.alive and not node.keys):
            return True
        known = sequence.tokens[at : at + self.block_size].tobytes()
        after = bisect_left(node.keys, known)
        return node.alive and not (after < len(node.keys) and node.keys[after].startswith(known))

    def fork(self, sequence: Sequence) -> Sequence:
        """A second sequence with the same tokens; all blocks are shared until one of them writes.

        Raises:
            ConfigError: tokens were appended and not committed, or the sequence is swapped out.
        """
        self._register.check_committed(sequence, "fork")
        twin = self.new_sequence(tenant=sequence.tenant)
        self._tables.share_all(sequence, twin)
        twin.node, twin.depth, twin.indexing = sequence.node, sequence.depth, sequence.indexing
        twin.length, twin.committed, twin.found = sequence.length, sequence.committed, sequence.found
        twin.tokens, twin.digests = sequence.tokens[:], sequence.digests
        return twin

    def truncate(self, sequence: Sequence, length: int) -> None:
        """End a sequence after its first `length` tokens: rejected drafts, or a rewind.

        Raises:
            ConfigError: longer than the sequence, or back to where a sliding-window group gave
                back blocks that would be seen again; nothing changed.
        """
        self._register.check_ready(sequence)
        self._tables.shorten(sequence, length)
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
        node, depth = sequence.node, sequence.depth
        while node.parent is not None and depth > sequence.found:
            self.pins.release(node)
            node, depth = node.parent, depth - 1
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

    def free(self, sequence: Sequence) -> Receipt:
        """End a sequence and give back what it holds. Indexed blocks stay cached."""
        self._register.check_live(sequence)
        self._end(sequence)
        return sequence.receipt.snapshot()

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

    def pin(self, prompt: Prompt, until: float) -> int:
        """Keep the indexed whole blocks of a prompt until a time on the caller's clock, in seconds.

        Pinning the same prefix again extends the pin. Returns the tokens pinned, maybe 0.

        Raises:
            OutOfBlocks: pins would hold more than their limit; nothing changed.
            ConfigError: `until` is not a finite number.
        """
        return self.pins.add(find(self.blocks, prompt, len(prompt.tokens)).nodes, until)

    def expire(self, now: float) -> int:
        """Release the pins whose time is over. Returns how many."""
        return self.pins.expire(now)

    def release_pin(self, tenant: str) -> bool:
        """Release the pin that ends first, so that a request of `tenant` may go on.

        False: there is no pin, or the tenant has a quota, which may be what is in its way.
        """
        return tenant not in self._accounts and self.pins.release_first()

    def set_quota(self, tenant: str, blocks: int) -> None:
        """Limit the blocks of every pool that a tenant may own, live and cached ones together.

        A tenant owns the blocks that its sequences took until they are free again; at its quota it
        gives up its own cached blocks, then it is refused. For sequences that start from now on.

        Raises:
            ConfigError: less than one block.
        """
        if not isinstance(blocks, int) or blocks < 1:
            raise ConfigError(f"a quota must be a number of at least one block, got {blocks!r}")
        accounts = self._accounts.setdefault(tenant, [Account(quota=blocks) for _ in self.pools])
        for account in accounts:
            account.quota = blocks

    def take_orders(self) -> list[Order]:
        """Every order queued since the last call, in order, each exactly once."""
        return self.blocks.take_orders()

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call `subscriber` with every event from now on. Returns a function that ends it."""
        return self.blocks.events.subscribe(subscriber)

    def usage(self) -> list[PoolUsage]:
        """Free, cached and live blocks per layer group."""
        return [pool.usage() for pool in self.pools]

    def utilization(self) -> float:
        """Tokens held / slots of live blocks, over all layer groups; 1.0 when nothing is live."""
        return self._tables.utilization(self.sequences())

    def drop_cached(self) -> None:
        """Evict every cached block. Live and pinned ones stay."""
        for pool in self.pools:
            pool.drop_cached()
        self.blocks.events.deliver()

    def grow(self, num_blocks: list[int]) -> None:
        """Enlarge the pools; the blocks there are keep their ids.

        Raises:
            ConfigError: a pool would shrink.
        """
        self.blocks.grow(num_blocks)

    def check_integrity(self) -> None:
        """Raise AssertionError, naming it, if any invariant of docs/blocks.md is broken."""
        check_integrity(
            self.blocks, self.sequences(), self.pins, self.swap, self.prefixes.computing(), self._accounts
        )

    def _make_room(self, work: Work) -> None:
        self._register.check_work(work)
        self._tables.make_room(work)
        if self.blocks.events.active:
            self.blocks.events.deliver()

    def _begin(self, prompt: Prompt) -> Sequence:
        check_prompt(self.blocks, prompt)
        sequence = self.new_sequence(tenant=prompt.tenant)
        sequence.node = self.blocks.index.root(prompt.root)
        sequence.tokens = prompt.tokens[:]
        sequence.digests = prompt.digests
        return sequence

    def _end(self, sequence: Sequence) -> None:
        """Release everything of a sequence, deepest blocks first."""
        self.prefixes.withdraw(sequence)
        if sequence.is_swapped:
            self.swap.discard(sequence)
        for pool, table, start in zip(self.pools, sequence.tables, sequence.starts, strict=True):
            pool.release_all(reversed(table[start:]))
            table.clear()
        sequence.starts = [0] * len(self.pools)
        sequence.length = sequence.committed = 0
        self._register.remove(sequence)
