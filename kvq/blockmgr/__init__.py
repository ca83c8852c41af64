"""Block memory: pools, reference counts, tables and slots. Plain Python, no torch."""

from kvq.blockmgr.ids import BlockId
from kvq.blockmgr.manager import BlockManager, Sequence
from kvq.blockmgr.pool import BlockPool

__all__ = ["BlockId", "BlockManager", "BlockPool", "Sequence"]
