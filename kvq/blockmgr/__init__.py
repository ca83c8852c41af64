"""Block memory: pools, prefix index, tables, copy-on-write, swap orders. Plain Python, no torch."""

from kvq.blockmgr.events import Event, Evicted, Found, Stored
from kvq.blockmgr.ids import BlockId, HostSlot
from kvq.blockmgr.manager import BlockManager
from kvq.blockmgr.orders import Copy, Order, Scrub, SwapIn, SwapOut
from kvq.blockmgr.pool import BlockPool, PoolUsage
from kvq.blockmgr.prefix import PrefixQuery
from kvq.blockmgr.prefixes import Match
from kvq.blockmgr.sequence import BlockUse, Sequence

__all__ = [
    "BlockId",
    "BlockManager",
    "BlockPool",
    "BlockUse",
    "Copy",
    "Event",
    "Evicted",
    "Found",
    "HostSlot",
    "Match",
    "Order",
    "PoolUsage",
    "PrefixQuery",
    "Scrub",
    "Sequence",
    "Stored",
    "SwapIn",
    "SwapOut",
]
