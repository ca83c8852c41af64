"""Quota: the bytes that every owner's blocks take in a tier, and which of them are over an owner's limit."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)


class Quota(Generic[Name]):
    """Bytes of blocks by owner. Of each owner, the least recently used blocks come first."""

    def __init__(self, limit: int) -> None:
        """`limit`: most bytes of one owner."""
        self.limit = limit
        self.nbytes = 0  # of all owners
        self._blocks: dict[Hashable, OrderedDict[Name, int]] = {}
        self._bytes: dict[Hashable, int] = {}

    def add(self, owner: Hashable, name: Name, nbytes: int) -> list[Name]:
        """Add a block. Return the blocks to remove, so that the owner keeps the limit."""
        own = self._blocks.setdefault(owner, OrderedDict())
        own[name] = nbytes
        self.nbytes += nbytes
        total = self._bytes[owner] = self._bytes.get(owner, 0) + nbytes
        over = []
        for other, size in own.items():
            if total <= self.limit:
                break
            over.append(other)
            total -= size
        return over

    def touch(self, owner: Hashable, name: Name) -> None:
        """Mark a block as used."""
        self._blocks[owner].move_to_end(name)

    def remove(self, owner: Hashable, name: Name) -> None:
        """Remove a block."""
        nbytes = self._blocks[owner].pop(name)
        self.nbytes -= nbytes
        self._bytes[owner] -= nbytes
        if not self._blocks[owner]:
            del self._blocks[owner], self._bytes[owner]
