"""A picture of the blocks: what state each is in, and whose it is."""

from collections.abc import Sequence as Row
from enum import IntEnum

from kvq.blockmgr.manager import BlockManager
from kvq.blockmgr.pool import BlockPool
from kvq.blockmgr.prefix import Node

MAX_OWNERS = 62  # tenants that are told apart
OTHERS = 63  # the owner code of all further ones


class BlockState(IntEnum):
    """The low two bits of a block's byte."""

    FREE = 0
    CACHED = 1
    LIVE = 2  # one reference
    SHARED = 3  # several


def take_census(manager: BlockManager, tenants: Row[str], *, stride: int = 1) -> list[bytes]:
    """One byte for every `stride`-th block of each pool: `owner << 2 | BlockState`. Changes nothing.

    The owner is 1 + the tenant's place in `tenants`, `OTHERS` beyond `MAX_OWNERS` of them, and 0 for free
    blocks and cached ones whose prefix belongs to nobody alone, or has a salt.
    O(blocks looked at + blocks held).
    """
    codes = {tenant: min(1 + i, OTHERS) << 2 for i, tenant in enumerate(tenants)}
    index = manager.blocks.index
    of_root = {index.root_digest(tenant): code for tenant, code in codes.items()}
    return [
        _look(pool, of_root, _held(manager, group, codes), stride) for group, pool in enumerate(manager.pools)
    ]


def _held(manager: BlockManager, group: int, codes: dict[str, int]) -> dict[int, int]:
    """Owner codes of the blocks in tables: of those that are not indexed nothing else tells."""
    held: dict[int, int] = {}
    for sequence in manager.sequences():
        if not sequence.is_swapped:
            held |= dict.fromkeys(sequence.held_in(group), codes.get(sequence.tenant, 0))
    return held


def _look(pool: BlockPool, of_root: dict[bytes, int], held: dict[int, int], stride: int) -> bytes:
    cells = bytearray()
    add = cells.append
    for block, references, entry in pool.every(stride):
        if entry is not None:
            assert isinstance(entry, Node), "blocks are indexed by nodes"
            state = min(1 + references, 3)
            add(of_root.get(entry.root, 0) | state)
        elif references:
            add(held.get(block, 0) | min(1 + references, 3))
        else:
            add(BlockState.FREE)
    return bytes(cells)
