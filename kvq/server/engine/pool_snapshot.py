"""Snapshot of block memory: the state and owner of every block."""

from collections.abc import Sequence as Row
from enum import IntEnum

from kvq.blockmgr.manager import BlockManager
from kvq.blockmgr.pool import BlockPool
from kvq.blockmgr.prefix import Node

MAX_OWNERS = 62  # tenants with their own owner codes
OTHERS = 63  # the owner code that all further tenants share


class _BlockState(IntEnum):  # D71: idle since it was last found, not since its release
    """State of a block, stored in the low two bits of the block's byte."""

    FREE = 0
    CACHED = 1
    LIVE = 2  # one reference
    SHARED = 3  # several references


def take_snapshot(manager: BlockManager, tenants: Row[str], *, stride: int = 1) -> list[bytes]:
    """Return one byte for every `stride`-th block of each pool: `owner << 2 | _BlockState`. Changes nothing.

    The owner code is 1 + the tenant's position in `tenants`, `OTHERS` for tenants beyond `MAX_OWNERS`, and 0
    for free blocks and for cached blocks whose prefix belongs to no single tenant or has a salt.
    O(blocks sampled + blocks held).
    """
    codes = {tenant: min(1 + i, OTHERS) << 2 for i, tenant in enumerate(tenants)}
    index = manager.blocks.index
    of_root = {index.root_digest(tenant): code for tenant, code in codes.items()}
    return [
        _look(pool, of_root, _held(manager, group, codes), stride) for group, pool in enumerate(manager.pools)
    ]


def _held(manager: BlockManager, group: int, codes: dict[str, int]) -> dict[int, int]:
    """Return the owner codes of blocks in sequences' tables, which alone show who owns unindexed blocks."""
    held: dict[int, int] = {}
    for sequence in manager.sequences():
        held |= dict.fromkeys(sequence.held_in(group), codes.get(sequence.tenant, 0))
    return held


def _look(pool: BlockPool, of_root: dict[bytes, int], held: dict[int, int], stride: int) -> bytes:
    cells = bytearray()
    add = cells.append
    for block, references, entry in pool.every(stride):
        if entry is not None:
            root = entry.root if isinstance(entry, Node) else b""  # an extent has blocks of several prefixes
            add(of_root.get(root, 0) | min(1 + references, 3))
        elif references:
            add(held.get(block, 0) | min(1 + references, 3))
        else:
            add(_BlockState.FREE)
    return bytes(cells)
