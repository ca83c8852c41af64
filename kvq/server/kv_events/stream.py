"""Block events from the engine to a publisher: never waiting for it, and right again after what was lost."""

from collections.abc import Sequence
from typing import Protocol

from kvq.blockmgr import BlockManager
from kvq.server.kv_events.follow import Followed
from kvq.server.kv_events.wire import Change, Cleared

_PIECE = 1024  # blocks of a batch, where all are told of again


class Sink(Protocol):
    """Who sends batches."""

    def put(self, changes: Sequence[Change]) -> bool:
        """Take a batch without waiting; False if there is no room."""


class EventStream:
    """What happens to one engine's blocks, batch by batch.

    A batch that found no room is counted. The next ones wait until there is room: everything is cleared then,
    and all that is held is told of again.
    """

    def __init__(self, manager: BlockManager, sink: Sink) -> None:
        self.followed = Followed(manager)
        self.sent = 0  # changes that the sink took
        self.dropped = 0
        self._sink = sink
        self._is_behind = True  # who listens may know an engine that is gone
        self._leave = manager.subscribe(self.followed)

    def flush(self) -> None:
        """Hand over what happened since the last call."""
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

    def tell_all(self) -> None:
        """With the next batch, tell of all that is held: somebody new listens."""
        self._is_behind = True

    def close(self) -> None:
        """Follow nothing any more, and say that nothing is held."""
        self._leave()
        self._put([Cleared()])

    def _put(self, changes: Sequence[Change]) -> bool:
        if self._sink.put(changes):
            self.sent += len(changes)
            return True
        self.dropped += len(changes)
        self._is_behind = True
        return False
