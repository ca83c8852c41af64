"""Block events from the engine to a publisher: never waits for it, and resends all after a loss."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from kvq.blockmgr import BlockManager, Event, Evicted, Stored
from kvq.server.kv_events.wire import Change, Entered, name_of

_PIECE = 1024  # blocks of a batch, where all are reported again


class EventStream:  # D351: the manager's own events, in vLLM's words
    """Changes of one engine's blocks, batch by batch. O(1) an event; keeps only the digest of a held block.

    Blocks of the first layer group stand for all: it is the one with full attention, if any has, whose blocks
    every hit needs. Prompts with a salt are left out: without the salt they look like others.

    A batch that found no room is counted. The next ones wait until there is room: everything is cleared then,
    and all that is held is reported again.
    """

    def __init__(self, manager: BlockManager, put: Callable[[Sequence[Change]], bool]) -> None:
        """`put` takes a batch without waiting; False if there is no room."""
        self.sent = 0  # changes that were taken
        self.dropped = 0
        self._take = put
        self._index = manager.blocks.index
        self._roots: set[bytes] = set()
        self._held: dict[bytes, None] = {}
        self._changes: list[Change] = []  # since the last `flush`
        self._is_behind = True  # listeners may know an engine that is gone
        self._leave = manager.subscribe(self._follow)

    def include(self, tenant: str) -> None:  # D353: salted prompts out, tenants' in
        """Report the blocks of a tenant's prompts without a salt from now on."""
        self._roots.add(self._index.root_digest(tenant))

    def flush(self) -> None:
        """Hand over the changes since the last call."""
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

    def tell_all(self) -> None:  # D352: numbers from the clock; subscribers get everything
        """Report all that is held with the next batch, for a new listener."""
        self._is_behind = True

    def close(self) -> None:
        """Stop following, and report that nothing is held."""
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
        """Yield all that is held, blocks after their parents. O(blocks)."""
        found = [node for digest in self._held if (node := self._index.get(digest)) is not None]
        found.sort(key=lambda node: node.depth)
        return (one for node in found if (one := self._entered(node.digest)) is not None)

    def _entered(self, digest: bytes) -> Entered | None:
        node = self._index.get(digest)
        if node is None or node.parent is None or node.root not in self._roots:
            return None  # it is not reported; or it has left, which the next event says
        parent = None if node.parent.parent is None else name_of(node.parent.digest)
        return Entered(name_of(digest), parent, node.tokens)

    def _put(self, changes: Sequence[Change]) -> bool:
        if self._take(changes):
            self.sent += len(changes)
            return True
        self.dropped += len(changes)
        self._is_behind = True
        return False
