"""Parsing HTTP in small slices: no client's bytes keep the event loop from everybody else's.

h11 takes about 30 microseconds for an event, and one read of a socket may hold ten thousand one-byte chunks.
"""

import asyncio
from collections import deque
from time import perf_counter
from typing import Any, Protocol

import h11

FREE_EVENTS = 32  # of one read that are parsed at once
_SLICE_EVENTS = 64  # about 2 ms
_SHARE = 0.25  # of the loop's time, for all that is parsed in slices
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


class Parsing(Protocol):
    """A connection that has more to parse."""

    def parse_on(self, num_events: int) -> bool:
        """Parse so many events; True if there is more."""


class Pump:
    """Lets connections parse on, one slice of one after the other, in a part of the loop's time."""

    def __init__(self) -> None:
        self._line: deque[Parsing] = deque()
        self._is_running = False

    def add(self, connection: Parsing) -> None:
        """Let a connection that is not in the line parse on in its turn."""
        self._line.append(connection)
        if not self._is_running:
            self._is_running = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        connection, began = self._line.popleft(), perf_counter()
        try:
            if connection.parse_on(_SLICE_EVENTS):
                self._line.append(connection)
        finally:
            self._is_running = bool(self._line)
            if self._is_running:
                pause_s = (perf_counter() - began) * (1 / _SHARE - 1)
                asyncio.get_running_loop().call_later(pause_s, self._turn)
