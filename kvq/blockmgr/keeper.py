"""The blocks of all layer groups, and all that is kept about them beside the sequences."""

from collections.abc import Callable, Iterable

from kvq.blockmgr.blocks import Blocks
from kvq.blockmgr.events import Order, Subscriber
from kvq.blockmgr.pins import Pins
from kvq.blockmgr.pool import BlockId, BlockPool, PoolUsage
from kvq.blockmgr.prefix import Digest, PrefixQuery, sha256_digest, token_array
from kvq.blockmgr.prefixes import Match, Prefixes, find, needed_blocks
from kvq.blockmgr.register import Register
from kvq.blockmgr.states import SNAPSHOT_EVERY
from kvq.blockmgr.swap import SwapSpace
from kvq.blockmgr.tables import Tables
from kvq.errors import ConfigError


class BlockKeeper:
    """What a `BlockManager` does without a sequence: lookups, pins, orders, gauges, growth."""

    def __init__(
        self,
        *,
        num_blocks: list[int],
        block_size: int,
        windows: list[int | None] | None = None,
        limits: list[int | None] | None = None,
        block_bytes: list[int] | None = None,
        host_slots: list[int] | None = None,
        reserve_blocks: int = 0,
        max_pinned_blocks: int | None = None,
        lag: int = 0,
        state_group: int | None = None,
        snapshot_every: int = SNAPSHOT_EVERY,
        identity: bytes = b"",
        digest: Digest = sha256_digest,
    ) -> None:
        """One entry of `num_blocks`, `windows`, `limits`, `block_bytes` and `host_slots` per layer group.

        `block_size` is in tokens; a window of None means full attention. A group with a limit holds the
        first so many tokens of every sequence, a multiple of the block size, and never any others; it
        has no window. `block_bytes`: of one block, for what receipts say, by default 1. `reserve_blocks`
        of every pool are kept from new sequences, so that running ones can grow. `max_pinned_blocks` of
        every pool may be pinned, by default half. `lag`: tokens that must be good after a block before
        the index may know it, where its bytes are made only then. `state_group`: of which the blocks hold
        recurrent states, one a sequence and what the index keeps: the state at the end of every prompt, and
        every `snapshot_every` tokens. Its window is 2. `identity` names the model and the
        recipe: prefixes of another identity never match.

        Raises:
            ConfigError: a number out of range, or lists of different lengths.
        """
        self.blocks = Blocks(
            num_blocks=num_blocks,
            block_size=block_size,
            windows=[None] * len(num_blocks) if windows is None else list(windows),
            lag=lag,
            state_group=state_group,
            snapshot_every=snapshot_every,
            limits=[None] * len(num_blocks) if limits is None else list(limits),
            block_bytes=[1] * len(num_blocks) if block_bytes is None else list(block_bytes),
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
        self._register = Register()

    @property
    def pools(self) -> list[BlockPool]:
        """The pools by layer group; for reading."""
        return self.blocks.pools

    def prompt(
        self,
        tokens: Iterable[int],
        *,
        tenant: str = "",
        shared_salt: str | None = None,
        cache_salt: str | None = None,
        max_reuse: int | None = None,
    ) -> PrefixQuery:
        """Prepare a prompt for `lookup` and `start`; hold on to it to hash its tokens only once.

        Prefixes are found among the same tenant's prompts only, or, with `shared_salt`, among all
        prompts that named the same salt, whoever sent them; with `cache_salt`, only among those of them that
        named the same one. `max_reuse`: take at most so many tokens from them, because those after it shall
        be computed: prompt log-probabilities need all of them.

        Raises:
            RequestError: an id that is no whole number of 0 to 2**32 - 1.
        """
        ids, index = token_array(tokens), self.blocks.index
        root = index.root_digest(tenant, shared_salt, cache_salt)
        return PrefixQuery(ids, tenant, root, ids.tobytes(), [], self.block_size, max_reuse)

    def lookup(self, prompt: PrefixQuery) -> Match:
        """How many tokens `start` would reuse, and who is computing the next ones. Changes nothing."""
        return self.prefixes.match(prompt)

    def held_prefix(self, prompt: PrefixQuery) -> tuple[int, list[int], list[list[BlockId]]]:
        """The longest hit in whole blocks: (length, starts, tables per group). Changes nothing."""
        hit = find(self.blocks, prompt, len(prompt.tokens))
        starts, held = needed_blocks(self.blocks, hit.nodes, len(hit.nodes) * self.block_size)
        tables = [[BlockId(0)] * start + blocks for start, blocks in zip(starts, held, strict=True)]
        return len(hit.nodes) * self.block_size, starts, tables

    def can_admit(self, prompt: PrefixQuery, count: int, *, spare: list[int] | None = None) -> bool:
        """True if a sequence could start and append `count` tokens beyond its hit now.

        `spare`: blocks per layer group to be left over, by default the reserve. Changes nothing.
        """
        left = [self.reserve_blocks] * len(self.pools) if spare is None else spare
        return self.prefixes.can_start(prompt, count, spare=left)

    def pin(self, prompt: PrefixQuery, until: float) -> int:
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

    def release_pin(self) -> bool:
        """Release the pin that ends first, so that a request may go on. False: there is none."""
        return self.pins.release_first()

    def take_orders(self) -> list[Order]:
        """Every order queued since the last call, in order, each exactly once."""
        return self.blocks.take_orders()

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call `subscriber` with every event from now on. Returns a function that ends it."""
        return self.blocks.events.subscribe(subscriber)

    def usage(self) -> list[PoolUsage]:
        """Free, cached and live blocks per layer group."""
        return [pool.usage() for pool in self.pools]

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
