"""Parsing HTTP in small slices: no client's bytes keep the event loop from everybody else's.

h11 takes about 30 microseconds for an event, and one read of a socket may hold ten thousand one-byte chunks.
"""

from typing import Any

import h11

FREE_EVENTS = 32  # of one read that are parsed at once
SLICE_EVENTS = 64  # about 2 ms
MAX_HEAD = 64 << 10  # bytes of a head, or of a chunk's
_FREE_CHUNKS = 1024  # of a body, however small
_LEAST_CHUNK = 128  # bytes, on the average of more than those
_FREE_WIRE = 1 << 20  # bytes of a body that are none of its content


class MeteredParser(h11.Connection):
    """h11's connection, which stops after so many events and takes no bodies of crumbs."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD)
        self.allowance = FREE_EVENTS  # events before it pretends to need more data
        self.ran_out = False  # it did
        self.refusal: str | None = None  # why this client is not listened to any more
        self._num_chunks = 0
        self._num_bytes = 0
        self._num_wire = 0

    def receive_data(self, data: bytes) -> None:
        """What came from the socket."""
        self._num_wire += len(data)
        super().receive_data(data)

    def next_event(self) -> Any:
        """The next event, or h11.NEED_DATA at the end of the allowance.

        Raises:
            h11.RemoteProtocolError: what came is no HTTP, or a body of crumbs.
        """
        if self.allowance <= 0:
            self.ran_out = True
            return h11.NEED_DATA
        event = super().next_event()
        self.allowance -= 1
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = self._num_wire = 0
        elif isinstance(event, h11.Data):
            self._count(event)
        return event

    def _count(self, data: h11.Data) -> None:
        self._num_chunks += data.chunk_start
        self._num_bytes += len(data.data)
        if self._num_chunks > _FREE_CHUNKS and self._num_bytes < (self._num_chunks - 1) * _LEAST_CHUNK:
            self.refusal = (
                f"a body in chunks of less than {_LEAST_CHUNK} bytes; send larger ones, or Content-Length"
            )
        elif self._num_wire > 2 * self._num_bytes + _FREE_WIRE:
            self.refusal = "chunks with more around them than in them; send larger ones, or Content-Length"
        if self.refusal is not None:
            raise h11.RemoteProtocolError(self.refusal)
