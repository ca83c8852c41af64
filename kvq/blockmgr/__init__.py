"""Block memory: pools, prefix index, tables, copy-on-write, orders over blocks. Plain Python, no torch."""

from kvq.blockmgr.events import Copy, Demote, Event, Evicted, Fill, Found, Order, Scrub, Stored
from kvq.blockmgr.hits import Match
from kvq.blockmgr.manager import BlockManager
from kvq.blockmgr.misses import CAUSES, PrefixMiss
from kvq.blockmgr.packed.ladder import Pack
from kvq.blockmgr.pool import BlockId, BlockPool, PoolUsage
from kvq.blockmgr.prefix import PrefixQuery
from kvq.blockmgr.sequence import HOLE, BlockUse, Sequence, StateMove

__all__ = [
    "CAUSES", "HOLE", "BlockId", "BlockManager", "BlockPool", "BlockUse", "Copy", "Demote", "Event",
    "Evicted", "Fill", "Found", "Match", "Order", "Pack", "PoolUsage", "PrefixMiss", "PrefixQuery", "Scrub",
    "Sequence", "StateMove", "Stored",
]  # fmt: skip
