"""Orders: what the block manager decided and `kvq.cache` has to do with the bytes.

Orders are carried out one after another in the order they were given, and before the writes of the
step that follows. A block may be freed and taken again between two orders; keeping their order is
what makes that safe.
"""

from dataclasses import dataclass

from kvq.blockmgr.ids import BlockId, HostSlot


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """Copy all bytes of a block: before a write into a shared block, or to reuse its first tokens."""

    group: int
    source: BlockId
    target: BlockId


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapOut:
    """Move a block's bytes to a host slot."""

    group: int
    block: BlockId
    slot: HostSlot


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapIn:
    """Bring a host slot's bytes back into a block. Fails if they are not what was moved out."""

    group: int
    slot: HostSlot
    block: BlockId


@dataclass(frozen=True, kw_only=True, slots=True)
class Scrub:
    """Zero a block whose request failed, before anybody else gets it."""

    group: int
    block: BlockId


Order = Copy | SwapOut | SwapIn | Scrub
