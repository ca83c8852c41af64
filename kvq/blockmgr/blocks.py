"""Memory of a block manager: the pools of all layer groups, the prefix index, orders and events."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, Unpack

from kvq.blockmgr.events import Copy, Demote, Events, Evicted, Order
from kvq.blockmgr.eviction import LeastRecent, Segmented
from kvq.blockmgr.misses import Misses, Takers
from kvq.blockmgr.packed.ladder import Ladder
from kvq.blockmgr.pool import BlockId, BlockPool
from kvq.blockmgr.prefix import Node, PrefixIndex
from kvq.blockmgr.states import SNAPSHOT_EVERY, States
from kvq.errors import ConfigError
from kvq.layout import Holding
from kvq.tiers.tiers import OWN_FORM, Form, Tiers

T = TypeVar("T")
WINDOWS_EVERY = 512  # tokens between positions whose windows the tiers keep
STATE_WINDOW = 2  # of a layer group of states: a token needs the state after the previous token


def _per_group(given: list[T] | None, default: T, num_groups: int) -> list[T]:
    return [default] * num_groups if given is None else list(given)


class Blocks:
    """Pools of all layer groups and the prefix index over them, for internal use by the block manager."""

    def __init__(
        self, num_blocks: list[int], block_size: int, identity: bytes, **options: Unpack[Holding]
    ) -> None:
        if block_size < 1:
            raise ConfigError(f"block_size must be at least 1 token, got {block_size}")
        if not num_blocks:
            raise ConfigError("num_blocks must name at least one layer group's pool, got none")
        if unknown := sorted(options.keys() - Holding.__annotations__.keys()):
            raise TypeError(f"BlockManager has no option {unknown[0]!r}")
        num_groups = len(num_blocks)
        self.block_size = block_size
        self.windows = _per_group(options.get("windows"), None, num_groups)
        self.limits = _per_group(options.get("limits"), None, num_groups)
        self.block_bytes = _per_group(options.get("block_bytes"), 1, num_groups)
        self.lag = options.get("lag", 0)
        rungs = options.get("rungs", {})
        self._check(num_groups)
        self.ends = [None if limit is None else limit // block_size for limit in self.limits]  # in blocks
        self.pools = [
            # D65: every token passes through the small pools of windows and states, so hits count for more
            BlockPool(
                count,
                on_evict=partial(self._evicted, group),
                relieve=partial(self._relieve, group) if group in rungs else None,
                policy=LeastRecent if window is None else Segmented,
            )
            for group, (count, window) in enumerate(zip(num_blocks, self.windows, strict=True))
        ]
        self.states = self._make_states(
            options.get("state_group"), options.get("snapshot_every", SNAPSHOT_EVERY)
        )
        self.index = PrefixIndex(block_size=block_size, num_groups=num_groups, identity=identity)
        self.misses = Misses(self.index, self.pools, self.windows, self.ends)
        self.events = Events()
        self.orders: list[Order] = []
        self.tiers: Tiers | None = None
        self.cold_share = 1.0  # largest share of a prompt that may have been stored in fewer bits
        self.tier_rungs: dict[int, int] = {}  # by layer group; blocks of others go to the tiers as they are
        self.ladder = Ladder(self.pools, {group: [self.block_bytes[group], *rungs[group]] for group in rungs})
        self._is_packing = False
        # Indexed blocks by (group, block), to be written to a disk while they are in their pools.
        self.unsaved: dict[tuple[int, BlockId], Node] = {}

    def _check(self, num_groups: int) -> None:
        """Raise ConfigError unless the options are within range and the lists have matching lengths."""
        for name in ("windows", "limits", "block_bytes"):
            length = len(getattr(self, name))
            if length != num_groups:
                raise ConfigError(
                    f"{name} and num_blocks need one entry per layer group, got {length} and {num_groups}"
                )
        if self.lag < 0:
            raise ConfigError(f"lag must be at least 0 tokens, got {self.lag}")
        if any(window is not None and window < 1 for window in self.windows):
            raise ConfigError(f"a window must be at least 1 token, or None, got {self.windows}")
        for limit, window in zip(self.limits, self.windows, strict=True):
            if limit is None:
                continue
            if limit < 1 or limit % self.block_size:
                raise ConfigError(
                    f"a limit must be a positive multiple of the block size {self.block_size}, or None, "
                    f"got {limit}"
                )
            if window is not None:
                raise ConfigError(
                    f"a layer group keeps the first {limit} tokens or a window of the last {window}, not "
                    f"both; make two groups"
                )

    def _make_states(self, group: int | None, every: int) -> States | None:
        if every < 1:
            raise ConfigError(f"snapshot_every must be at least 1 token, got {every}")
        if group is None:
            return None
        if self.windows[group] != STATE_WINDOW:
            raise ConfigError(f"layer group {group} holds states, so its window is {STATE_WINDOW}")
        size = self.block_size
        return States(group=group, pool=self.pools[group], block_size=size, every=-(-every // size) * size)

    @property
    def state_group(self) -> int | None:
        """The layer group that stores recurrent states."""
        return None if self.states is None else self.states.group

    def first_seen(self, group: int, length: int) -> int:
        """Return the index of the first block visible to a token at position `length` or later."""
        window = self.windows[group]
        return 0 if window is None else max(0, length - window + 1) // self.block_size

    def entries(self, group: int, length: int) -> int:  # D62: tables of a limited group end at the limit
        """Return the table length for `length` tokens. A table has no entries beyond its group's limit."""
        total, end = -(-length // self.block_size), self.ends[group]
        return total if end is None else min(total, end)

    def num_groups_at(self, index: int) -> int:
        """Return the number of layer groups with blocks at a table index, that is, with a limit above it."""
        return sum(end is None or index < end for end in self.ends)

    def can_take(
        self, demand: list[int], *, beside: list[list[BlockId]], spare: list[int] | None = None
    ) -> bool:
        """Return True if `take(demand)` would succeed after sharing the blocks in `beside`. Changes nothing.

        `spare`: number of blocks that must stay free in each pool; None means 0.
        """
        spare = spare or [0] * len(self.pools)
        for pool, count, shared, left in zip(self.pools, demand, beside, spare, strict=True):
            used = sum(not pool.references(block) for block in shared)
            if count + left > pool.num_available - used:
                return False
        return True

    def take(self, demand: list[int], takers: Takers = ()) -> list[list[BlockId]]:
        """Allocate `demand[g]` blocks in every group, or raise OutOfBlocks and allocate nothing.

        `takers`: the sequences that need them, by layer group.
        """
        for pool, count in zip(self.pools, demand, strict=True):  # before any block is evicted
            pool.check_room(count)
        self.misses.takers = takers
        taken: list[list[BlockId]] = [[] for _ in self.pools]
        try:
            for pool, count, got in zip(self.pools, demand, taken, strict=True):
                got += pool.allocate(count)
        except BaseException:
            self.release(taken)
            raise
        finally:
            self.misses.takers = ()
        return taken

    def share(self, held: list[list[BlockId]]) -> None:
        """Add a reference to each of these blocks in every group."""
        for pool, blocks in zip(self.pools, held, strict=True):
            for block in blocks:
                pool.share(block)

    def release(self, held: list[list[BlockId]]) -> None:
        """Drop a reference to each of these blocks in every group. The deepest blocks are evicted first."""
        for pool, blocks in zip(self.pools, held, strict=True):
            pool.release_all(reversed(blocks))

    def grow(self, num_blocks: list[int]) -> None:
        """Enlarge the pools. If any pool would shrink, raise ConfigError and change nothing."""
        now = [pool.num_blocks for pool in self.pools]
        if len(num_blocks) != len(now) or any(new < old for new, old in zip(num_blocks, now, strict=True)):
            raise ConfigError(f"pools can only grow, from {now} blocks, got {num_blocks}")
        for pool, count in zip(self.pools, num_blocks, strict=True):
            pool.grow(count)

    @contextmanager
    def discarding(self) -> Iterator[None]:
        """Within this context, evicted blocks are lost, since their bytes can't be trusted."""
        tiers, self.tiers = self.tiers, None
        try:
            yield
        finally:
            self.tiers = tiers

    def order(self, order: Copy) -> None:  # D53: one queue of orders, in strict order
        """Queue a copy, and the corresponding event."""
        self.orders.append(order)
        if self.events.active:
            self.events.add(order)

    def take_orders(self) -> list[Order]:
        """Return all orders queued since the last call, each exactly once, in the order of queueing."""
        orders, self.orders = self.orders, []
        return orders

    def _relieve(self, group: int, count: int) -> None:
        """Make up to `count` blocks of a pool free by packing cached ones."""
        self._is_packing = True
        try:
            self.orders.extend(self.ladder.relieve(group, count))
        finally:
            self._is_packing = False
        while self.pools[group].num_free < count and (block := self.ladder.coldest(group)) is not None:
            self.pools[group].forget(block)  # its extent goes before blocks that are not packed

    def _evicted(self, group: int, blocks: list[BlockId], entries: list[Any]) -> list[BlockId]:
        """Forget blocks that a group's pool evicts or packs. Return others that can't be found any more."""
        nodes, stranded = entries, []
        if not all(isinstance(entry, Node) for entry in entries):
            nodes = [entry for entry in entries if isinstance(entry, Node)]
            for extent in dict.fromkeys(entry for entry in entries if not isinstance(entry, Node)):
                stranded += self._evict_extent(group, extent)
        if self.events.active or self.tiers is not None:
            for block, node in zip(blocks, entries, strict=True):
                if isinstance(node, Node):
                    self._note_evicted(group, block, node)
        after = self.index.forget(nodes, group)
        if not self._is_packing:
            self.misses.evicted(group, nodes)
        return stranded + after if self.windows[group] is None else stranded

    def _note_evicted(self, group: int, block: BlockId, node: Node) -> None:
        if self.events.active:
            self.events.add(Evicted(group=group, block=block, digest=node.digest))
        if self.tiers is None or self._is_packing or not self.outlasts(group, node):
            return
        if self.tiers.wants(key := node.key(group)):
            form = self.form_below(group, node)
            self.orders.append(Demote(group=group, source=block, key=key, form=form))

    def form_below(self, group: int, node: Node) -> Form:
        """Return the form in which a block that is not packed goes to the tiers."""
        rung = self.tier_rungs.get(group, 0)
        return Form(rung, max(rung, node.coldest)) if rung or node.coldest else OWN_FORM

    def outlasts(self, group: int, node: Node) -> bool:  # D399
        """Return True if the tiers should keep a block. Of a window, most blocks are of no use later.

        A prompt goes on where another one or its answer ended, or leaves it anywhere; for that case, the
        windows before some positions are kept.
        """
        if self.windows[group] is None or group == self.state_group or node.is_end:
            return True
        every = max(WINDOWS_EVERY, self.block_size)
        end = -(-node.depth * self.block_size // every) * every
        return node.depth > self.first_seen(group, end)

    def _evict_extent(self, group: int, extent: Any) -> list[BlockId]:
        """Pass on what an extent holds to the tiers, unless it is rewritten. Return its other blocks."""
        if self._is_packing:
            return []
        for packed, key in self.ladder.evicted(extent, group):
            if self.tiers is not None and self.tiers.wants(key):
                self.orders.append(Demote(group=group, source=packed, key=key, form=packed.form))
        return [block for block in extent.blocks if self.pools[group].entry(block) is extent]
