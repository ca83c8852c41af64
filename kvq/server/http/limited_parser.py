"""HTTP parser that works in small slices, which keeps any one client from blocking the event loop.

h11 takes about 30 microseconds per event, and a single socket read may return ten thousand one-byte chunks.
"""

from typing import Any, NoReturn

import h11
from h11._receivebuffer import ReceiveBuffer, blank_line_regex

from kvq.server.http.problems import Problem

# D307: 64 KB may contain ten thousand events of 30 us
SLICE_EVENTS = 32  # events per slice, about 1 ms
# D309: at most 128 lines; heads that arrive together are parsed in turn
MAX_LINES = 128  # lines of a head, or of the trailers after the last chunk
MAX_HEAD = 64 << 10  # bytes of a request's head, or of a chunk's head
_FREE_CHUNKS = 1024  # chunks of a body that may have any size
_LEAST_CHUNK = 128  # minimum average bytes per chunk of a body with more chunks
_INSTEAD = "send larger ones, or Content-Length"
_FREE_WIRE = 1 << 20  # bytes of overhead that a body may have


class LimitedParser(h11.Connection):
    """h11 connection that pauses after a number of events and refuses bodies in tiny chunks."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD)
        self._receive_buffer = _Lines()
        self.allowance = SLICE_EVENTS  # remaining events before `next_event` returns NEED_DATA
        self.ran_out = False  # the allowance was used up
        self.refusal: Problem | None = None  # reason for closing the connection
        self._num_chunks = 0
        self._num_bytes = 0
        self._num_wire = 0

    def receive_data(self, data: bytes) -> None:
        self._num_wire += len(data)
        super().receive_data(data)

    def next_event(self) -> Any:
        """Return the next event, or h11.NEED_DATA if the allowance is used up.

        Raises:
            h11.RemoteProtocolError: the bytes are not HTTP, or the chunks of the body are too small.
        """
        if self.allowance <= 0:
            self.ran_out = True
            return h11.NEED_DATA
        try:
            event = super().next_event()
        except _TooManyLines as error:
            self.refusal = Problem(431, str(error))
            raise
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
            self._refuse(400, f"a body in chunks of less than {_LEAST_CHUNK} bytes; {_INSTEAD}")
        elif self._num_wire > 2 * self._num_bytes + _FREE_WIRE:
            self._refuse(400, f"chunks with more around them than in them; {_INSTEAD}")

    def _refuse(self, status: int, why: str) -> NoReturn:
        self.refusal = Problem(status, why)
        raise h11.RemoteProtocolError(why)


class _TooManyLines(h11.RemoteProtocolError):
    """Error: a head, or the trailers after the last chunk, have too many lines."""


class _Lines(ReceiveBuffer):
    """Buffer of unparsed bytes that limits lines; h11 parses a head or trailers of any length as one event.

    The buffer has no reference to its parser: the cycle would stay in memory until garbage collection.
    """

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Return all lines up to the first empty line, or None before an empty line arrives."""
        if len(self._data) > MAX_LINES:
            end = blank_line_regex.search(self._data, self._multiple_lines_search)
            if self._data.count(b"\n", 0, end.end() if end else None) > MAX_LINES + 2:  # plus first and last
                raise _TooManyLines(f"a request may have {MAX_LINES} lines of headers")
        return super().maybe_extract_lines()
