"""HTTP server: uvicorn's protocol, used with a listener that limits connections."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator
from functools import partial

import uvicorn
from fastapi import FastAPI

from kvq.errors import ConfigError
from kvq.server.http.credentials import Credentials
from kvq.server.http.listener import Listener
from kvq.server.http.protocol import Connection, prepare

_END_S = 0.3  # time to write responses after the engine has ended
_STUCK_S = 2  # time to close all connections afterwards


class HttpServer(uvicorn.Server):
    """uvicorn server without signal handlers, which lets running requests end before sockets are closed."""

    def __init__(self, app: FastAPI) -> None:
        app.openapi()  # generated now, once: this is slow, and a client would have to wait later
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                http=Connection,
                ws="none",
                timeout_graceful_shutdown=_STUCK_S,
            )
        )
        self.config.load()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def listen(
        self, sock: socket.socket, credentials: Credentials, *, max_connections: int, max_per_address: int
    ) -> Listener:
        """Accept connections on a listening socket, with TLS if the server has a certificate.

        Raises:
            ConfigError: the limit on open files leaves none for connections.
        """
        listener = Listener(
            sock,
            tls=None if credentials.context is None else lambda: credentials.context,
            max_connections=max_connections,
            max_per_address=max_per_address,
        )
        listener.open(partial(Connection, self.config, self.server_state, {}, asyncio.get_running_loop()))
        return listener

    async def end(self, listener: Listener, serving: "asyncio.Task[None]") -> None:
        """Close the listener, allow a moment for responses to be written, and wait for `serving` to end."""
        listener.close()
        self.should_exit = True
        asyncio.get_running_loop().call_later(_END_S, listener.drop_all)
        await serving


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
