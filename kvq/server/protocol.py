"""HTTP/1.1 connections, with bounds on how many there are, how slowly they begin and how much they buffer."""

import asyncio
import json
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvq.server.problems import Problem, unavailable

MAX_CONNECTIONS = 4096
HEAD_S = 10.0  # for the head of a request, from its first byte or the connection's beginning
_WRITE_BUFFER = 8 << 10  # bytes
_KERNEL_BUFFER = 64 << 10  # bytes, of what is sent; the kernel would take megabytes for who does not read
_UNREAD_S = 60  # until the kernel gives up a connection whose reader takes nothing


class Connection(H11Protocol):
    """uvicorn's connection, whose refusals are error objects."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, unless there are too many."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_WRITE_BUFFER)
        self.app_state = {**self.app_state, "kvq_transport": transport}
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(unavailable(f"{MAX_CONNECTIONS} connections are open; try again later"))
            return
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """Read on, while the head of a request comes in time."""
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody is there any more."""
        self._unwatch_head()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        self._refuse(Problem(400, msg))

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
        """Answer with an error object and close, whatever state the connection is in."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(problem.body()).encode()
            headers = [("content-type", "application/json"), ("connection", "close")]
            headers += [("content-length", str(len(body))), *problem.headers().items()]
            events: list[Any] = [
                h11.Response(status_code=problem.status, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ]
            for event in events:
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def prepare(listener: socket.socket) -> None:
    """Set on a listening socket what its connections inherit."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KERNEL_BUFFER)
    # asyncio sets this only where it knows the protocol, which create_server leaves open. Without it an
    # answer's body waits until the client's kernel, in no hurry (40 ms), has acknowledged the head.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_S * 1000)
