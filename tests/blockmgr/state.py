"""Everything that an operation of the block manager could change, as values that can be compared."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvq.blockmgr import BlockManager, BlockPool, Sequence


def state(manager: BlockManager) -> dict[str, Any]:
    """Pools, index, sequences, pins, announcements and waiting orders."""
    names = {id(sequence): i for i, sequence in enumerate(manager.sequences())}
    return {
        "pools": [_pool(pool) for pool in manager.pools],
        "index": sorted(
            (node.digest, node.parent.digest, node.tokens, tuple(node.blocks)) for node in _nodes(manager)
        ),
        "roots": sorted(root.digest for root in manager.blocks.index.roots()),
        "sequences": [_sequence(sequence) for sequence in manager.sequences()],
        "pins": [(pin.length, pin.blocks, pin.until) for pin in manager.pins.all()],
        "computing": {digest: names[id(s)] for digest, s in manager.prefixes.computing().items()},
        "orders": manager.blocks.orders[:],
        "events": manager.blocks.events._queue[:],
    }


def unordered(snapshot: dict[str, Any]) -> dict[str, Any]:
    """The same without the order in which free blocks are given away."""
    pools = [{**pool, "free": sorted(pool["free"])} for pool in snapshot["pools"]]
    return {**snapshot, "pools": pools}


def _nodes(manager: BlockManager) -> Iterator[Any]:
    return manager.blocks.index.nodes()


def _pool(pool: BlockPool) -> dict[str, Any]:
    blocks = range(pool.num_blocks)
    return {
        "free": list(pool._free),
        "cached": pool.cached_blocks(),
        "refs": pool._refs[:],
        "entries": [getattr(pool.entry(block), "digest", None) for block in blocks],
    }


def _sequence(s: Sequence) -> dict[str, Any]:
    fields = (
        "starts",
        "length",
        "committed",
        "adopted",
        "depth",
        "indexing",
        "announced",
        "tenant",
    )
    return {
        **{name: repr(getattr(s, name)) for name in fields},
        "tables": [table[start:] for table, start in zip(s.tables, s.starts, strict=True)],
        "sizes": [len(table) for table in s.tables],
        "tokens": list(s.tokens),
        "node": s.node.digest,
        "receipt": replace(s.receipt),
    }
