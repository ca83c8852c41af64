"""The memory that sequences and pins share: pools, prefix index, orders and events."""

from typing import Any

from kvq.blockmgr.events import Copy, Events, Evicted, Order, Stored, SwapIn, SwapOut
from kvq.blockmgr.pool import BlockId, BlockPool, EvictionListener
from kvq.blockmgr.prefix import Digest, Node, PrefixIndex
from kvq.blockmgr.sequence import Sequence
from kvq.blockmgr.states import States
from kvq.errors import ConfigError

STATE_WINDOW = 2  # of a layer group of states: a token needs the state after the one before it


class Blocks:
    """Pools by layer group with the index over them. Used by the parts of the block manager only."""

    def __init__(
        self,
        *,
        num_blocks: list[int],
        block_size: int,
        windows: list[int | None],
        limits: list[int | None],
        block_bytes: list[int],
        lag: int = 0,
        state_group: int | None = None,
        snapshot_every: int = 1,
        identity: bytes,
        digest: Digest,
    ) -> None:
        if block_size < 1:
            raise ConfigError(f"block_size must be at least 1 token, got {block_size}")
        if not num_blocks:
            raise ConfigError("num_blocks must name at least one layer group's pool, got none")
        lengths = {"windows": len(windows), "limits": len(limits), "block_bytes": len(block_bytes)}
        for name, length in lengths.items():
            if length != len(num_blocks):
                raise ConfigError(
                    f"{name} and num_blocks need one entry per layer group, got {length} and "
                    f"{len(num_blocks)}"
                )
        if snapshot_every < 1:
            raise ConfigError(f"snapshot_every must be at least 1 token, got {snapshot_every}")
        if lag < 0:
            raise ConfigError(f"lag must be at least 0 tokens, got {lag}")
        if any(window is not None and window < 1 for window in windows):
            raise ConfigError(f"a window must be at least 1 token, or None, got {windows}")
        _check_limits(limits, windows, block_size)
        self.block_size = block_size
        self.lag = lag
        self.windows = windows
        self.limits = limits
        self.block_bytes = block_bytes
        self.ends = [None if limit is None else limit // block_size for limit in limits]  # of tables, blocks
        self.pools = [
            BlockPool(count, on_evict=self._listener(group), favours_hits=windows[group] is not None)
            for group, count in enumerate(num_blocks)
        ]
        if state_group is not None and windows[state_group] != STATE_WINDOW:
            raise ConfigError(f"layer group {state_group} holds states, so its window is {STATE_WINDOW}")
        self.states = (
            None
            if state_group is None
            else States(
                group=state_group,
                pool=self.pools[state_group],
                block_size=block_size,
                every=-(-snapshot_every // block_size) * block_size,
            )
        )
        self.index = PrefixIndex(
            block_size=block_size, num_groups=len(num_blocks), identity=identity, digest=digest
        )
        self.events = Events()
        self.orders: list[Order] = []

    @property
    def state_group(self) -> int | None:
        """The layer group that holds recurrent states."""
        return None if self.states is None else self.states.group

    def first_seen(self, group: int, length: int) -> int:
        """Index of the first block that a token at position `length`, or any later one, can see."""
        window = self.windows[group]
        return 0 if window is None else max(0, length - window + 1) // self.block_size

    def entries(self, group: int, length: int) -> int:
        """How many entries a table has for so many tokens: none beyond the group's limit."""
        total, end = -(-length // self.block_size), self.ends[group]
        return total if end is None else min(total, end)

    def num_groups_at(self, index: int) -> int:
        """How many layer groups have blocks at an index of their tables: those with no limit before it."""
        return sum(end is None or index < end for end in self.ends)

    def can_take(
        self, demand: list[int], *, beside: list[list[BlockId]], spare: list[int] | None = None
    ) -> bool:
        """True if `take(demand)` would succeed with the blocks `beside` shared first. Changes nothing.

        `spare`: blocks of every pool that must be left over; None for none.
        """
        spare = spare or [0] * len(self.pools)
        for pool, count, shared, left in zip(self.pools, demand, beside, spare, strict=True):
            used = sum(not pool.references(block) for block in shared)
            if count + left > pool.num_available - used:
                return False
        return True

    def take(self, demand: list[int]) -> list[list[BlockId]]:
        """Allocate so many blocks in every group; all, or OutOfBlocks."""
        for pool, count in zip(self.pools, demand, strict=True):  # before anything is evicted
            pool.check_room(count)
        taken: list[list[BlockId]] = [[] for _ in self.pools]
        try:
            for pool, count, got in zip(self.pools, demand, taken, strict=True):
                got += pool.allocate(count)
        except BaseException:
            self.release(taken)
            raise
        return taken

    def share(self, held: list[list[BlockId]]) -> None:
        """Add a reference to blocks of every group."""
        for pool, blocks in zip(self.pools, held, strict=True):
            for block in blocks:
                pool.share(block)

    def release(self, held: list[list[BlockId]]) -> None:
        """Drop a reference of blocks of every group; the last ones, the deepest, are given away first."""
        for pool, blocks in zip(self.pools, held, strict=True):
            pool.release_all(reversed(blocks))

    def grow(self, num_blocks: list[int]) -> None:
        """Enlarge the pools; ConfigError if one would shrink, and nothing changed."""
        now = [pool.num_blocks for pool in self.pools]
        if len(num_blocks) != len(now) or any(new < old for new, old in zip(num_blocks, now, strict=True)):
            raise ConfigError(f"pools can only grow, from {now} blocks, got {num_blocks}")
        for pool, count in zip(self.pools, num_blocks, strict=True):
            pool.grow(count)

    def order(self, order: Copy | SwapOut | SwapIn) -> None:
        """Queue an order that moves bytes, and tell of it."""
        self.orders.append(order)
        if self.events.active:
            self.events.add(order)

    def take_orders(self) -> list[Order]:
        """Every order queued since the last call, in order, each exactly once."""
        orders, self.orders = self.orders, []
        return orders

    def publish(self, sequence: Sequence) -> bool:
        """Index the full committed blocks of a sequence whose tokens are known.

        A block whose tokens are indexed already gives way to the one that the index knows, so that
        equal prefixes computed side by side end up in one copy.

        Returns False if a digest collision stopped the chain, or a fork that would lose its prefix.
        """
        self.climb(sequence)
        size = self.block_size
        full = self.indexable(sequence)
        while sequence.depth < full:
            i = sequence.depth
            tokens = sequence.tokens[i * size : (i + 1) * size].tobytes()
            known = sequence.digests
            digest = known[i] if i < len(known) else self.index.chain(sequence.node.digest, tokens)
            node = self.index.insert(sequence.node, digest, tokens)
            if node is None or self._parts_forks(sequence, i, node):
                break
            for group in range(len(self.pools)):
                if sequence.holds(group, i) and self._is_kept(sequence, group, i):
                    self._settle(sequence, group, i, node)
            sequence.node = node
            sequence.depth += 1
        self.index.prune(sequence.node)
        return sequence.depth == full

    def _is_kept(self, sequence: Sequence, group: int, i: int) -> bool:
        """True but for states that are not to be found again: they move on with their sequence."""
        return self.states is None or group != self.states.group or self.states.keeps(sequence, i)

    def indexable(self, sequence: Sequence) -> int:
        """Blocks of a sequence that the index may know: full, committed, of known tokens, old enough."""
        known = min(sequence.committed, len(sequence.tokens))
        return min(known, max(sequence.adopted, sequence.committed - self.lag)) // self.block_size

    def climb(self, sequence: Sequence) -> None:
        """Step back from nodes that left the index while the sequence did not hold their blocks."""
        while not sequence.node.alive:  # a root always is
            sequence.step_back()

    def _parts_forks(self, sequence: Sequence, i: int, node: Node) -> bool:
        """True if a sequence would give up a block that a fork goes on with.

        With a lag forks share full blocks that are not indexed yet. Were those after this one indexed then,
        the fork would hold them without the prefix that the index knows, which might go before they do.
        """
        return self.lag > 0 and any(
            known is not None and known != table[i] and pool.references(table[i]) > 1
            for group, (pool, table, known) in enumerate(
                zip(self.pools, sequence.tables, node.blocks, strict=True)
            )
            if sequence.holds(group, i) and group != sequence.state_group
        )

    def _settle(self, sequence: Sequence, group: int, i: int, node: Node) -> None:
        """Let the index know a sequence's block, or let the sequence use the one it knows."""
        table, pool = sequence.tables[group], self.pools[group]
        mine, known = table[i], node.blocks[group]
        if known is None:
            pool.keep(mine, node)
            self.index.attach(node, group, mine)
            if self.events.active:
                assert node.parent is not None, "a root has no blocks"
                self.events.add(
                    Stored(group=group, block=mine, digest=node.digest, parent=node.parent.digest)
                )
        elif known != mine:
            pool.share(known)
            pool.release(mine)
            table[i] = known
            sequence.mark(group, i)

    def unpublish(self, sequence: Sequence) -> None:
        """Take what a sequence computed and nobody else uses out of the index, deepest first.

        After a swap some of its blocks may be indexed beyond its depth: their neighbours in other layer
        groups were evicted meanwhile.
        """
        self.climb(sequence)
        for i in reversed(range(sequence.depth, max(map(len, sequence.tables)))):
            for group, (pool, table) in enumerate(zip(self.pools, sequence.tables, strict=True)):
                if sequence.holds(group, i) and pool.entry(table[i]) is not None:
                    if pool.references(table[i]) > 1:
                        return
                    pool.forget(table[i])
        while (parent := sequence.node.parent) is not None and sequence.depth > sequence.found:
            i, held = sequence.depth - 1, list(enumerate(sequence.node.blocks))
            if any(
                block is not None and self.pools[group].references(block) > sequence.holds(group, i)
                for group, block in held
            ):
                break
            sequence.node, sequence.depth = parent, i
            for group, block in held:
                if block is not None:
                    self.pools[group].forget(block)

    def _listener(self, group: int) -> EvictionListener:
        """What a group's pool calls when it evicts."""
        needs_prefix = self.windows[group] is None

        def evicted(blocks: list[BlockId], entries: list[Any]) -> list[BlockId]:
            if self.events.active:
                for block, node in zip(blocks, entries, strict=True):
                    self.events.add(Evicted(group=group, block=block, digest=node.digest))
            stranded = self.index.forget(entries, group)
            return stranded if needs_prefix else []

        return evicted


def _check_limits(limits: list[int | None], windows: list[int | None], block_size: int) -> None:
    for limit, window in zip(limits, windows, strict=True):
        if limit is None:
            continue
        if limit < 1 or limit % block_size:
            raise ConfigError(
                f"a limit must be a positive multiple of the block size {block_size}, or None, got {limit}"
            )
        if window is not None:
            raise ConfigError(
                f"a layer group keeps the first {limit} tokens or a window of the last {window}, not both; "
                f"make two groups"
            )
