"""HTTP/1.1 connections with limits on parsing, on buffers and on the arrival time of request heads."""

import asyncio
import errno
import json
import socket
from typing import Any, NoReturn

import h11
import uvicorn
from h11._receivebuffer import ReceiveBuffer, blank_line_regex
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from kvq.errors import ConfigError
from kvq.server.http.listener import Slot, Stage
from kvq.server.http.loop_budget import Again, LoopBudget
from kvq.server.http.problems import Problem, unavailable

# D307: 64 KB may contain ten thousand events of 30 us
SLICE_EVENTS = 32  # events per slice, about 1 ms
# D309: at most 128 lines; heads that arrive together are parsed in turn
MAX_LINES = 128  # lines of a head, or of the trailers after the last chunk
MAX_HEAD = 64 << 10  # bytes of a request's head, or of a chunk's head
_FREE_CHUNKS = 1024  # chunks of a body that may have any size
_LEAST_CHUNK = 128  # minimum average bytes per chunk of a body with more chunks
_INSTEAD = "send larger ones, or Content-Length"
_FREE_WIRE = 1 << 20  # bytes of overhead that a body may have


class _LimitedParser(h11.Connection):
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


HEAD_S = 10.0  # limit for a request head, from its first byte or the connection's start
_SMALL_READ = 1 << 10  # bytes
_SMALL_READS = 64  # small reads per second and connection that complete nothing
_WRITE_BUFFER = 8 << 10  # bytes
_KERNEL_BUFFER = 64 << 10  # bytes to send; the kernel would buffer megabytes for a client that does not read
_UNREAD_S = 60  # until the kernel drops a connection whose client reads nothing


class _Flow(FlowControl):
    """Flow control for reading, which is paused at the request of the application or of this server."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._is_asked = False
        self._is_held = False

    def pause_reading(self) -> None:
        self._is_asked = True
        super().pause_reading()

    def resume_reading(self) -> None:
        self._is_asked = False
        if not self._is_held:
            super().resume_reading()

    def hold(self, is_held: bool) -> None:
        """Pause or resume reading; while `is_held`, the application can't resume it."""
        self._is_held = is_held
        if is_held:
            super().pause_reading()
        elif not self._is_asked:
            super().resume_reading()


class Connection(H11Protocol):  # D304: h11: deadlines, plain errors, a small write buffer
    """uvicorn's connection with limited parsing, and with refusals as error objects.

    The first slice of data is parsed immediately; the rest takes turns with other connections. The rate of
    small reads that complete nothing is also limited, because such reads cost as much as large ones.
    """

    flow: _Flow
    _head_timer: asyncio.TimerHandle | None = None

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        slot: Slot | None = None,
    ) -> None:
        """`slot`: the connection's slot at the listener, which tracks its stage."""
        super().__init__(config, server_state, app_state, _loop)
        self.conn: _LimitedParser = _LimitedParser()
        self._slot = slot
        self._budget = LoopBudget() if slot is None else slot.listener.budget
        self._body_budget = self._budget if slot is None else slot.listener.body_budget
        self._is_in_line = False  # the connection is queued to continue parsing
        self._stage = Stage.SILENT  # stage before the connection was queued
        self._is_resting = False  # reading pauses after too many small reads
        self._num_small = 0
        self._counted_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport)
        transport.set_write_buffer_limits(high=_WRITE_BUFFER)
        self.app_state = {**self.app_state, "kvq_transport": transport}
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """Parse data; refuse the connection if a request head does not arrive in time."""
        before = self.cycle, self.conn.their_state
        super().data_received(data)
        is_parsed = not self._is_in_line
        if is_parsed and len(data) < _SMALL_READ and before == (self.cycle, self.conn.their_state):
            self._count_small()
        self._watch_head()

    def handle_events(self) -> None:
        """Parse a slice, immediately if the budget allows; queue the rest with other connections."""
        if self._is_in_line:
            return
        self._is_in_line = True
        budget = self._body_budget if self.conn.their_state is h11.SEND_BODY else self._budget
        budget.soon("" if self._slot is None else self._slot.address, self._parse_on)
        if self._is_in_line:
            self._hold()
            if self._slot is not None and self._slot.stage is not Stage.BUSY:
                self._stage = self._slot.stage
                self._slot.enter(Stage.BUSY)  # the data may contain a request

    def on_response_complete(self) -> None:
        if self._slot is not None:
            self._slot.enter(Stage.IDLE)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch_head()
        super().connection_lost(exc)
        if self._slot is not None:
            self._slot.leave()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP, or a body in too many tiny chunks."""
        self._refuse(self.conn.refusal or Problem(400, msg))
        self._hang_up()

    def _hang_up(self) -> None:
        """Notify the reader of the body that no more data will arrive."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def shutdown(self) -> None:
        """Finish a response in progress or refuse an incomplete request, at shutdown."""
        is_asking = self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.SEND_RESPONSE
        if is_asking and self.cycle is not None:
            self._refuse(unavailable("the server is shutting down"))
            self._hang_up()
        else:
            super().shutdown()

    def _parse(self) -> bool:
        """Parse a slice; return True if unparsed data remains."""
        self.conn.allowance, self.conn.ran_out = SLICE_EVENTS, False
        if not self.transport.is_closing():
            super().handle_events()
        if self._slot is not None:
            is_asking = self.cycle is not None and not self.cycle.response_complete
            if is_asking:
                self._slot.enter(Stage.BUSY)
            elif self._slot.stage is Stage.BUSY:
                self._slot.enter(self._stage)
        return self.conn.ran_out and not self.transport.is_closing()

    def _parse_on(self) -> Again:
        """Parse the next slice, and request another call if unparsed data remains."""
        self._is_in_line = self._parse()
        if not self._is_in_line:
            self._hold()
            self._watch_head()
        return Again.IN_TURN if self._is_in_line else Again.NO

    def _count_small(self) -> None:
        now = self.loop.time()
        if now - self._counted_s >= 1:
            self._num_small, self._counted_s = 0, now
        self._num_small += 1
        if self._num_small > _SMALL_READS and not self._is_resting:
            self._is_resting = True
            self._hold()
            self.loop.call_at(self._counted_s + 1, self._rest_no_more)

    def _rest_no_more(self) -> None:
        self._is_resting = False
        self._hold()

    def _hold(self) -> None:
        if not self.transport.is_closing():  # a closing TLS connection can't be paused
            self.flow.hold(self._is_in_line or self._is_resting)

    def _watch_head(self) -> None:
        is_idle = self.conn.their_state is h11.IDLE and not self.transport.is_closing()
        if not is_idle:
            self._unwatch_head()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._give_up)

    def _unwatch_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if self.conn.their_state is h11.IDLE:
            self._refuse(Problem(408, f"no request came within {HEAD_S:g} s"))

    def _refuse(self, problem: Problem) -> None:
        """Send an error object if a response can still be sent, then close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(problem.body()).encode()
            headers = [("content-type", "application/json"), ("connection", "close")]
            headers += [("content-length", str(len(body))), *problem.headers().items()]
            events: list[Any] = [h11.Response(status_code=problem.status, headers=headers)]
            if self.conn.our_state is h11.IDLE or self.scope["method"] != "HEAD":  # without a body
                events.append(h11.Data(data=body))
            events.append(h11.EndOfMessage())
            for event in events:
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def prepare(listener: socket.socket) -> None:
    """Set the options of a listening socket that its connections inherit."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KERNEL_BUFFER)
    # asyncio sets this only if it knows the protocol, which create_server leaves unset. Without it, an
    # response's body waits until the client's kernel has acknowledged the head, which takes 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # D305
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_S * 1000)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address; clients can connect and queue from then on.

    Raises:
        ConfigError: the address can't be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        why = error.strerror
        if error.errno == errno.EADDRINUSE:
            why = "another program has that port; end it, or give another --port"
        raise ConfigError(f"can't listen on {host}:{port}: {why}") from error
    prepare(sock)
    return sock
