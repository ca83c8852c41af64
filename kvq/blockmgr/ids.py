"""Ids of the block manager, kept apart by the type checker."""

from typing import NewType

BlockId = NewType("BlockId", int)  # index of a block in the pool of its layer group
HostSlot = NewType("HostSlot", int)  # index of a block's place in host memory or a file
