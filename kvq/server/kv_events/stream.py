"""Block events from the engine to a publisher: never waits for it, and resends all after a loss."""

from collections.abc import Callable, Sequence

from kvq.blockmgr import BlockManager, Event, Evicted, Stored
from kvq.server.kv_events.wire import Change, Cleared, Entered, Left, name_of


class _Followed:  # D351: the manager's own events, in vLLM's words
    """A subscriber to block events. O(1) an event; keeps only the digest of a block that is held.

    Blocks of the first layer group stand for all: it is the one with full attention, if any has, whose blocks
    every hit needs. Prompts with a salt are left out: without the salt they look like others.
    """

    def __init__(self, manager: BlockManager) -> None:
        self._index = manager.blocks.index
        self._roots: set[bytes] = set()
        self._held: dict[bytes, None] = {}
        self._changes: list[Change] = []

    def include(self, tenant: str) -> None:  # D353: salted prompts out, tenants' in
        """Report the blocks of a tenant's prompts without a salt from now on."""
        self._roots.add(self._index.root_digest(tenant))

    def __call__(self, event: Event) -> None:
        """Follow one event."""
        if isinstance(event, Stored) and event.group == 0:
            entered = self._entered(event.digest)
            if entered is not None:
                self._held[event.digest] = None
                self._changes.append(entered)
        elif isinstance(event, Evicted) and event.group == 0 and event.digest in self._held:
            del self._held[event.digest]
            self._changes.append(Left(name_of(event.digest)))

    def take(self) -> list[Change]:
        """Return the changes since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def held(self, piece: int) -> list[list[Change]]:
        """Return all that is held, blocks after their parents, in pieces of `piece` blocks. O(blocks)."""
        found = [node for digest in self._held if (node := self._index.get(digest)) is not None]
        found.sort(key=lambda node: node.depth)
        changes: list[Change] = [one for node in found if (one := self._entered(node.digest)) is not None]
        return [changes[at : at + piece] for at in range(0, len(changes), piece)]

    def _entered(self, digest: bytes) -> Entered | None:
        node = self._index.get(digest)
        if node is None or node.parent is None or node.root not in self._roots:
            return None  # it is not reported; or it has left, which the next event says
        parent = None if node.parent.parent is None else name_of(node.parent.digest)
        return Entered(name_of(digest), parent, node.tokens)


_PIECE = 1024  # blocks of a batch, where all are reported again


class EventStream:
    """Changes of one engine's blocks, batch by batch.

    A batch that found no room is counted. The next ones wait until there is room: everything is cleared then,
    and all that is held is reported again.
    """

    def __init__(self, manager: BlockManager, put: Callable[[Sequence[Change]], bool]) -> None:
        """`put` takes a batch without waiting; False if there is no room."""
        self.followed = _Followed(manager)
        self.sent = 0  # changes that were taken
        self.dropped = 0
        self._take = put
        self._is_behind = True  # listeners may know an engine that is gone
        self._leave = manager.subscribe(self.followed)

    def flush(self) -> None:
        """Hand over the changes since the last call."""
        changes = self.followed.take()
        if not self._is_behind:
            if changes:
                self._put(changes)
            return
        if self._put([Cleared()]):
            self._is_behind = False
            for piece in self.followed.held(_PIECE):
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
        self._put([Cleared()])

    def _put(self, changes: Sequence[Change]) -> bool:
        if self._take(changes):
            self.sent += len(changes)
            return True
        self.dropped += len(changes)
        self._is_behind = True
        return False
