"""Stream of block events from the engine to a publisher, and the wire format of the events.

The engine never waits for the publisher; if events are lost, all blocks are reported again. The format is
MessagePack, byte for byte the same as in vLLM 0.32, where each event is a map. Earlier versions wrote arrays
(the kind, then the fields), which some subscribers expect.

Source: vllm/distributed/kv_events.py. Hashes are the last 64 bits of kvq's digests: numbers from vLLM have 64
bits, and routers keep only 64 bits of longer hashes.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec

from kvq.blockmgr import BlockManager, Event, Evicted, Stored
from kvq.server.kv_events.config import Form

_MEDIUM = "GPU"  # vLLM's name for the memory of the KV cache, even on a CPU
_PIECE = 1024  # blocks per batch in a report of all blocks


Entered = tuple[
    int, int | None, bytes
]  # a block's name, its parent's name (None for a prompt's first block), its token ids
Change = (
    Entered | int | None
)  # a newly indexed block; the name of a block removed from the index; None: all blocks were removed


class _BlockStored(msgspec.Struct, omit_defaults=True, tag="BlockStored"):
    """Event: consecutive blocks of one prompt were added to the prefix index."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int  # tokens
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: None = None
    group_idx: int | None = None


class _BlockRemoved(msgspec.Struct, omit_defaults=True, tag="BlockRemoved"):
    """Event: these blocks were removed from the prefix index."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class _AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag="AllBlocksCleared"):
    """Event: all blocks were removed from the prefix index."""


_Event = _BlockStored | _BlockRemoved | _AllBlocksCleared
_encoder = msgspec.msgpack.Encoder()


def name_of(digest: bytes) -> int:
    """Return the name under which routers know a block: the last 64 bits of its digest."""
    return int.from_bytes(digest[-8:], "big")


def encode(changes: Iterable[Change], *, block_size: int, now: float, form: Form = "maps") -> bytes:
    """Encode a batch; merge consecutive blocks of a chain, and consecutive removals, into one event."""
    events: list[_Event] = []
    for change in changes:
        last = events[-1] if events else None
        if change is None:
            events.append(_AllBlocksCleared())
            continue
        if isinstance(change, int):
            if isinstance(last, _BlockRemoved):
                last.block_hashes.append(change)
            else:
                events.append(_BlockRemoved([change], _MEDIUM, 0))
            continue
        name, parent, packed = change
        tokens = array("I", packed)
        if isinstance(last, _BlockStored) and last.block_hashes[-1] == parent:
            last.block_hashes.append(name)
            last.token_ids += tokens
        else:
            place = (None, _MEDIUM, None, None, 0)  # no LoRA; layer group
            events.append(_BlockStored([name], parent, tokens.tolist(), block_size, *place))
    told: list[Any] = list(events)
    if form == "arrays":
        told = [[event.__struct_config__.tag, *msgspec.structs.astuple(event)] for event in events]
    return _encoder.encode([now, told, 0])  # seconds since 1970, events, rank of data parallelism


class EventStream:  # D351: the manager's own events, in vLLM's format
    """Stream of changes to an engine's blocks, in batches. O(1) per event; stores only digests of blocks.

    Only blocks of the first layer group are reported: if any group has full attention, the first group does,
    and every hit needs its blocks. Salted prompts, and tokens of adapters, are omitted: without
    salt or adapter, they look like other prompts.

    If the publisher's queue is full, a batch is dropped and counted. Once there is room again, a clear event
    is sent, and all held blocks are reported again.
    """

    def __init__(self, manager: BlockManager, put: Callable[[Sequence[Change]], bool]) -> None:
        """`put` queues a batch without waiting, or returns False if there is no room."""
        self.sent = 0  # changes that `put` accepted
        self.dropped = 0
        self._take = put
        self._index = manager.blocks.index
        self._roots: set[bytes] = set()
        self._held: dict[bytes, None] = {}
        self._changes: list[Change] = []  # changes since the last `flush`
        self._is_behind = True  # subscribers may have blocks of an earlier engine
        self._leave = manager.subscribe(self._follow)

    def include(self, tenant: str) -> None:  # D353: without salted prompts, with prompts of tenants
        """Start reporting the blocks of a tenant's unsalted prompts."""
        self._roots.add(self._index.root_digest(tenant))

    def flush(self) -> None:
        """Pass the changes since the last call to the publisher."""
        changes, self._changes = self._changes, []
        if not self._is_behind:
            if changes:
                self._put(changes)
            return
        if self._put([None]):
            self._is_behind = False
            held = self._all_held()
            while piece := list(islice(held, _PIECE)):
                if not self._put(piece):
                    return
        else:
            self.dropped += len(changes)

    def tell_all(self) -> None:  # D352: numbers come from the clock; new subscribers get everything
        """Report all held blocks with the next batch, for a new subscriber."""
        self._is_behind = True

    def close(self) -> None:
        """Unsubscribe, and report that no blocks are held."""
        self._leave()
        self._put([None])

    def _follow(self, event: Event) -> None:
        if isinstance(event, Stored) and event.group == 0:
            entered = self._entered(event.digest)
            if entered is not None:
                self._held[event.digest] = None
                self._changes.append(entered)
        elif isinstance(event, Evicted) and event.group == 0 and event.digest in self._held:
            del self._held[event.digest]
            self._changes.append(name_of(event.digest))

    def _all_held(self) -> Iterator[Entered]:
        """Yield all held blocks, parents first. O(blocks)."""
        found = [node for digest in self._held if (node := self._index.get(digest)) is not None]
        found.sort(key=lambda node: node.depth)
        return (one for node in found if (one := self._entered(node.digest)) is not None)

    def _entered(self, digest: bytes) -> Entered | None:
        node = self._index.get(digest)
        if node is None or node.parent is None or node.root not in self._roots:
            return None  # not reported, or evicted, which the next event reports
        if self._index.tag_of(node.tokens):
            return None  # of an adapter
        parent = None if node.parent.parent is None else name_of(node.parent.digest)
        return name_of(digest), parent, node.tokens

    def _put(self, changes: Sequence[Change]) -> bool:
        if self._take(changes):
            self.sent += len(changes)
            return True
        self.dropped += len(changes)
        self._is_behind = True
        return False
