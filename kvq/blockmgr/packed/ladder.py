"""Ladder: cached blocks are rewritten in fewer bits within their pool before any of them is evicted.

The coldest blocks of a pool are packed into the first few of themselves, an extent, and the others become
free. If that does not suffice, the coldest extents are rewritten in the format of the next rung, and after
the last rung they are evicted. Blocks in extents are not indexed: a prompt that needs them gets them back in
the pool's own format, as from the tiers. Nobody who runs reads them, so nobody waits.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

from kvq.blockmgr.pool import BlockId, BlockPool
from kvq.blockmgr.prefix import Node
from kvq.tiers.tiers import BlockKey, Form

_AT_ONCE = 16  # blocks packed together
_LEAST = 4  # fewer save too little


@dataclass(slots=True, eq=False)
class _Extent:
    """Blocks of a pool that hold the packed blocks of one rung. They are cached blocks of the pool."""

    blocks: list[BlockId]
    rung: int
    keys: list[BlockKey | None]  # by slot; None where the packed block is gone
    holds: int = 0  # loads that read from it
    unpacked: set[BlockKey] = field(default_factory=set)  # meanwhile; removed once nobody reads it

    def live(self) -> list[tuple[int, BlockKey]]:
        """Return the slots in use, with what they hold."""
        return [(slot, key) for slot, key in enumerate(self.keys) if key is not None]


@dataclass(frozen=True, slots=True)
class Packed:
    """Place of a packed block: bytes [slot * size, (slot + 1) * size) of an extent."""

    blocks: tuple[BlockId, ...]
    slot: int
    form: Form


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """Order: rewrite blocks, or packed blocks, in the format of a rung, into an extent."""

    group: int
    sources: tuple[BlockId | Packed, ...]
    targets: tuple[BlockId, ...] = ()
    rung: int


@dataclass(slots=True, eq=False)
class _Level:
    """Extents of one pool by rung, coldest first."""

    pool: BlockPool
    sizes: list[int]  # bytes of a block by rung; rung 0 is the pool's own format
    extents: list[OrderedDict[_Extent, None]] = field(init=False)

    def __post_init__(self) -> None:
        self.extents = [OrderedDict() for _ in self.sizes]

    def num_blocks(self, count: int, rung: int) -> int:
        """Return the number of the pool's blocks that `count` packed blocks take."""
        return -(-count * self.sizes[rung] // self.sizes[0])


class Ladder:  # D401
    """Packed blocks of all pools that have rungs."""

    def __init__(self, pools: list[BlockPool], sizes: dict[int, list[int]]) -> None:
        """`sizes`: bytes of a block by rung, for each layer group with rungs, from the pool's own format."""
        self._levels = {group: _Level(pools[group], own) for group, own in sizes.items()}
        self._held: set[_Extent] = set()
        self._where: dict[BlockKey, tuple[_Extent, int, int]] = {}  # slot, and the coldest rung so far
        self.is_worth = True  # whether rewriting takes less time than computing
        self.num_packed = self.num_evicted = 0  # blocks, since the start

    def __len__(self) -> int:
        return len(self._where)

    @property
    def has_rungs(self) -> bool:
        """True if any pool has rungs."""
        return bool(self._levels)

    def find(self, key: BlockKey) -> Packed | None:
        """Return where a block is packed, or None if it isn't."""
        found = self._where.get(key)
        return None if found is None else _packed(*found)

    def extents(self, group: int) -> list[_Extent]:
        """Return all extents of a layer group."""
        level = self._levels.get(group)
        if level is None:
            return []
        held = [extent for extent in self._held if level.pool.entry(extent.blocks[0]) is extent]
        return [*held, *(extent for rung in level.extents for extent in rung)]

    def hold(self, keys: Iterable[BlockKey]) -> None:
        """Keep the extents of these blocks until `drop`, whatever memory is needed."""
        for key in keys:
            extent = self._where[key][0]
            if not extent.holds:
                del self._levels[key.group].extents[extent.rung][extent]
                self._held.add(extent)
                for block in extent.blocks:
                    self._levels[key.group].pool.share(block)
            extent.holds += 1

    def drop(self, keys: Iterable[BlockKey], *, read: bool) -> None:
        """End the hold on these blocks. `read`: they are in the pool's own format now."""
        for key in keys:
            extent = self._where[key][0]
            extent.holds -= 1
            if read:
                extent.unpacked.add(key)
            if not extent.holds:
                for one in extent.unpacked:
                    extent.keys[self._where.pop(one)[1]] = None
                extent.unpacked.clear()
                level = self._levels[key.group]
                self._held.remove(extent)
                level.pool.release_all(extent.blocks)
                if extent.live():
                    level.extents[extent.rung][extent] = None
                else:
                    for block in extent.blocks:
                        level.pool.free_cached(block)

    def relieve(self, group: int, need: int) -> Iterator[Pack]:
        """Free blocks of a pool until `need` are free or nothing is left to rewrite. Yields the orders."""
        level = self._levels.get(group)
        while level is not None and self.is_worth and level.pool.num_free < need:
            order = self._pack_nodes(group, level) or self._pack_extent(group, level)
            if order is None:
                return
            yield order

    def coldest(self, group: int) -> BlockId | None:
        """Return a block of the extent to evict first, or None if there is none or computing is faster."""
        level = self._levels.get(group)
        extents = [] if level is None or not self.is_worth else reversed(level.extents)
        return next((extent.blocks[0] for rung in extents for extent in rung), None)

    def forget(self, key: BlockKey) -> None:
        """Remove a packed block that is in the pool's own format again, once no load reads it."""
        found = self._where.get(key)
        if found is None:
            return
        extent, slot, _ = found
        if extent.holds:
            extent.unpacked.add(key)
            return
        del self._where[key]
        extent.keys[slot] = None
        if not extent.live():
            level = self._levels[key.group]
            del level.extents[extent.rung][extent]
            for block in extent.blocks:
                level.pool.free_cached(block)

    def evicted(self, extent: _Extent, group: int) -> list[tuple[Packed, BlockKey]]:
        """Forget an extent one of whose blocks was evicted. Return what it held."""
        level = self._levels[group]
        level.extents[extent.rung].pop(extent, None)
        held = [(_packed(*self._where.pop(key)), key) for _, key in extent.live()]
        self.num_evicted += len(held)
        extent.keys = []
        return held

    def _pack_nodes(self, group: int, level: _Level) -> Pack | None:
        """Pack the coldest indexed blocks. Return None if there are too few."""
        pool, nodes = level.pool, []
        for block in list(islice(pool.coldest(), 4 * _AT_ONCE)):
            entry = pool.entry(block)
            if isinstance(entry, Node):
                if entry.key(group) in self._where:  # a load reads it
                    continue
                nodes.append((block, entry))
                if len(nodes) == _AT_ONCE:
                    break
            else:
                pool.refresh(block)  # so that the next search is short
        if len(nodes) < _LEAST:
            return None
        sources = [block for block, _ in nodes]
        keys = {node.key(group): node.coldest for _, node in nodes}
        pool.take_out(sources)
        self.num_packed += len(keys)
        return self._new_extent(level, sources, keys, Pack(group=group, sources=tuple(sources), rung=1))

    def _pack_extent(self, group: int, level: _Level) -> Pack | None:
        """Rewrite the coldest extent that has a next rung, or has gaps. Return None if there is none."""
        for rung in range(1, len(level.sizes)):
            for extent in level.extents[rung]:
                held, colder = extent.live(), min(rung + 1, len(level.sizes) - 1)
                if level.num_blocks(len(held), colder) < len(extent.blocks):
                    del level.extents[rung][extent]
                    places = [self._where[key] for _, key in held]
                    level.pool.take_out(extent.blocks)
                    order = Pack(group=group, sources=tuple(_packed(*one) for one in places), rung=colder)
                    keys = {key: one[2] for (_, key), one in zip(held, places, strict=True)}
                    return self._new_extent(level, extent.blocks, keys, order)
        return None

    def _new_extent(
        self, level: _Level, blocks: list[BlockId], keys: dict[BlockKey, int], order: Pack
    ) -> Pack:
        """Pack into the first of `blocks`, which are in no list of the pool, and free the others.

        `keys`: what is packed, with the coldest rung that it has been on. Returns the complete order.
        """
        count = level.num_blocks(len(keys), order.rung)
        extent = _Extent(blocks[:count], order.rung, list(keys))
        for slot, (key, coldest) in enumerate(keys.items()):
            self._where[key] = extent, slot, max(coldest, order.rung)
        level.extents[order.rung][extent] = None
        level.pool.put_back(extent.blocks, extent, blocks[count:])
        return replace(order, targets=tuple(extent.blocks))

    def check_integrity(self, group: int) -> None:
        """Raise AssertionError if an extent's blocks are not its own, or a packed block can't be found."""
        level = self._levels.get(group)
        if level is None:
            return
        for rung, extents in enumerate(level.extents):
            for extent in extents:
                assert extent.rung == rung, "an extent is on the wrong rung"
                assert not extent.holds, "an extent that is read may be evicted"
                assert extent.live(), "an extent is kept for nothing"
                for block in extent.blocks:
                    assert level.pool.entry(block) is extent, "an extent's block is another's"
                for slot, key in extent.live():
                    assert self._where[key][:2] == (extent, slot), "a packed block can't be found"


def _packed(extent: _Extent, slot: int, coldest: int) -> Packed:
    return Packed(tuple(extent.blocks), slot, Form(extent.rung, coldest))
