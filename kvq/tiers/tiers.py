"""Tiers: blocks that left the pools, found by the digests of the prefix index, in host memory and on disk.

Under pressure, host memory passes its least recently used blocks on to the disk. A block that is also in a
pool is the first to leave host memory, and comes back to it when the pool evicts it.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvq.tiers.disk import Block, DiskTier
from kvq.tiers.quota import Quota
from kvq.tiers.segment import content_digest

_MOST_OWNERS = 100_000  # roots whose owners are remembered
_FULL_S = 0.005  # until the queue of a slow disk is looked at again


class BlockKey(NamedTuple):
    """Identity of a block's content."""

    root: bytes  # digest of the model, recipe and salt
    digest: bytes  # of its tokens and all before them, from the prefix index
    group: int  # layer group


class Form(NamedTuple):
    """Format of a block's bytes, and of the fewest bits in which its values were ever stored, as rungs.

    Rung 0 is the format of the pools.
    """

    rung: int = 0
    coldest: int = 0


OWN_FORM = Form()


@dataclass(slots=True, eq=False)
class _Held:
    """Block in host memory."""

    owner: str
    content: Any  # a buffer
    form: Form
    digest: bytes
    used_s: float


class Fetch:
    """Blocks on their way back to the pools."""

    def __init__(self, tiers: "Tiers", keys: list[BlockKey]) -> None:
        """Begin to read the blocks that are not in host memory."""
        self._tiers, self.keys = tiers, keys
        self._held = [tiers.in_host(key) for key in keys]
        below = [key for key, held in zip(keys, self._held, strict=True) if held is None]
        self._coming = tiers.read(below) if below else None
        self._read: dict[BlockKey, tuple[Any, tuple[int, int]] | None] | None = None if below else {}

    @property
    def is_done(self) -> bool:
        """True once no block is still being read."""
        return self._coming is None or self._coming.done()

    def is_from_disk(self, index: int) -> bool:
        """Return True if a block was not in host memory."""
        return self._held[index] is None

    def take(self, index: int) -> tuple[Any, Form] | None:
        """Return a block's bytes, a buffer, or None if it is lost. Call this once `is_done` is True."""
        key, held = self.keys[index], self._held[index]
        if held is not None:
            return (held.content, held.form) if self._tiers.is_intact(key, held) else None
        if self._read is None:
            assert self._coming is not None, "something is read"
            below = [key for key, one in zip(self.keys, self._held, strict=True) if one is None]
            self._read = dict(zip(below, self._coming.result(), strict=True))
        found = self._read[key]
        return None if found is None else (found[0], Form(*found[1]))


class Tiers:
    """Host memory and a disk. All methods are called by the engine's thread and return at once."""

    def __init__(
        self,
        host_bytes: int,
        disk: DiskTier | None,
        *,
        groups: set[int] | None = None,
        max_age_s: float | None = None,
        tenant_share: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create empty host memory of `host_bytes`. `groups`: layer groups to keep; None: all.

        `tenant_share`: largest share of one tenant. `max_age_s`: time since the last use after which a block
        is dropped.
        """
        self.host_bytes, self.groups = host_bytes, groups
        self.disk = disk
        self._clock = clock
        self.max_age_s = max_age_s
        self._host: OrderedDict[BlockKey, _Held] = OrderedDict()  # least recently used first
        self._by_use: OrderedDict[BlockKey, None] = OrderedDict()  # all in host memory, the oldest use first
        self._quota: Quota[BlockKey] = Quota(int(tenant_share * host_bytes))
        self._owners: OrderedDict[bytes, str] = OrderedDict()  # by root
        self.num_damaged = self.num_dropped = 0  # in host memory, since the start
        self.on_aged: Callable[[BlockKey], object] = lambda key: None  # called for every block too old

    @property
    def nbytes(self) -> int:
        """Bytes in host memory."""
        return self._quota.nbytes

    def __len__(self) -> int:
        return len(self._host)

    def gauges(self) -> dict[str, Any]:
        """Return bytes by tier, and totals of blocks that were dropped or damaged since the start."""
        found = {"host": self.nbytes}
        dropped, damaged = self.num_dropped, self.num_damaged
        if self.disk is not None:
            found["disk"] = self.disk.nbytes
            dropped, damaged = dropped + self.disk.counts.dropped, damaged + self.disk.counts.damaged
        return {"tier_bytes": found, "dropped_blocks": dropped, "damaged_blocks": damaged}

    def learn(self, root: bytes, owner: str) -> None:
        """Remember whose prompts have this root."""
        self._owners[root] = owner
        self._owners.move_to_end(root)
        if len(self._owners) > _MOST_OWNERS:
            self._owners.popitem(last=False)

    def find(self, key: BlockKey) -> Form | None:
        """Return the form of a block in host memory or on disk, or None if it is in neither."""
        held = self._host.get(key)
        if held is not None and not self._is_old(held):
            return held.form
        name = b"" if self.disk is None else self._name(key)
        if self.disk is not None and (form := self.disk.find(name)) is not None:
            return Form(*form)
        if held or (self.max_age_s is not None and self.disk is not None and self.disk.has_aged(name)):
            self.on_aged(key)
        return None

    def wants(self, key: BlockKey) -> bool:
        """Return True if a block that leaves its pool should be put here; False if it is here already."""
        held = self._host.get(key)
        if held is not None:
            self._use(key, held)
            return False
        if self.groups is not None and key.group not in self.groups:
            return False
        return bool(self.host_bytes) or (self.disk is not None and not self.disk.holds(self._name(key)))

    def put(self, key: BlockKey, content: Any, form: Form = OWN_FORM) -> None:
        """Take the bytes of a block that left its pool. `content`: a buffer that nobody changes any more."""
        nbytes = memoryview(content).nbytes
        if nbytes > self._quota.limit:
            self.save(key, content, form)
            return
        if key in self._host:
            return
        while self._quota.nbytes + nbytes > self.host_bytes:
            self._pass_on(next(iter(self._host)))
        digest = content_digest(key.digest, key.group, content)
        owner = self._owners.get(key.root, "")
        self._host[key] = _Held(owner, content, form, digest, self._clock())
        self._by_use[key] = None
        for other in self._quota.add(owner, key, nbytes):
            self._pass_on(other)

    def save(self, key: BlockKey, content: Any, form: Form = OWN_FORM, idle_s: float = 0) -> None:
        """Write a block, last used `idle_s` ago, to the disk soon, if there is a disk."""
        if self.disk is not None:
            self.disk.write(self._address(key), content, form, idle_s)
        else:
            self.num_dropped += 1

    def is_saved(self, key: BlockKey) -> bool:
        """Return True if a block is on disk, or there is no disk."""
        return self.disk is None or self.disk.holds(self._name(key))

    def fetch(self, keys: list[BlockKey]) -> Fetch:
        """Begin to bring blocks back. Afterwards, they are the first to leave host memory."""
        return Fetch(self, keys)

    def in_host(self, key: BlockKey) -> "_Held | None":
        """Return a block in host memory that is about to be in a pool again, or None if it isn't there."""
        held = self._host.get(key)
        if held is not None:
            self._use(key, held)
            self._host.move_to_end(key, last=False)
        return held

    def is_intact(self, key: BlockKey, held: "_Held") -> bool:
        """Return True if a block's bytes are those that were put. Otherwise, drop the block."""
        if content_digest(key.digest, key.group, held.content) == held.digest:
            return True
        self.num_damaged += 1
        if self._host.get(key) is held:
            self._drop(key)
        return False

    def read(self, keys: list[BlockKey]) -> "Future[list[Any]]":
        """Begin to read blocks from the disk."""
        assert self.disk is not None, "it holds the blocks"
        return self.disk.read([self._address(key) for key in keys])

    def expire(self) -> None:
        """Drop blocks that were not used for too long from host memory."""
        while self._by_use and self._is_old(self._host[key := next(iter(self._by_use))]):
            self._drop(key)
            self.on_aged(key)

    def close(self) -> None:
        """Write everything that is not on disk yet, and close the files. Waits."""
        for key in list(self._host):
            while self.disk is not None and not self.disk.has_room and not self.disk.is_failing:
                time.sleep(_FULL_S)
            self._pass_on(key)
        if self.disk is not None:
            self.disk.close()

    def _use(self, key: BlockKey, held: _Held) -> None:
        held.used_s = self._clock()
        self._host.move_to_end(key)
        self._by_use.move_to_end(key)
        self._quota.touch(held.owner, key)

    def _pass_on(self, key: BlockKey) -> None:
        """Remove a block from host memory, and write it to the disk if it is not there."""
        held = self._host[key]
        self._drop(key)
        if self._is_old(held):
            self.on_aged(key)
        elif self.disk is None or not self.is_saved(key):
            self.save(key, held.content, held.form, self._clock() - held.used_s)

    def _drop(self, key: BlockKey) -> None:
        self._by_use.pop(key)
        self._quota.remove(self._host.pop(key).owner, key)

    def _is_old(self, held: _Held) -> bool:
        return self.max_age_s is not None and self._clock() - held.used_s > self.max_age_s

    def _address(self, key: BlockKey) -> Block:
        return self._owners.get(key.root, ""), self._name(key), key.group

    def _name(self, key: BlockKey) -> bytes:
        assert self.disk is not None, "only there, blocks have names"
        return self.disk.sealing.name(self._owners.get(key.root, ""), key.digest, key.group)
