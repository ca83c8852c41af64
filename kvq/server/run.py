"""HTTP process of `kvq serve`, from startup to shutdown, with one model or several."""

import asyncio
import contextlib
import gc
import logging
import os
import selectors
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from time import thread_time
from typing import Any

import uvicorn
from fastapi import FastAPI

from kvq.errors import EngineError, KVQError
from kvq.models.describe.resolve import ModelSource
from kvq.models.loading.tokenizer import load_without_torch
from kvq.server.admission.config import ServerConfig
from kvq.server.admission.service import Service
from kvq.server.app import create_app
from kvq.server.assembly import make_remote, make_service
from kvq.server.engine.messages import Ready
from kvq.server.http.credentials import Credentials
from kvq.server.http.listener import Listener
from kvq.server.http.protocol import Connection, listen
from kvq.server.logs import configure, log_event
from kvq.server.models.config import ModelsConfig
from kvq.server.models.fleet import Fleet

_log = logging.getLogger("kvq")
_END_S = 0.3  # time to write responses after the engine has ended
_STUCK_S = 2  # time to close all connections afterwards


class _Stretches(selectors.DefaultSelector):
    """Event loop selector that records the longest time for which the loop does not poll its sockets.

    The time between two polls is measured as processor time, so other processes do not affect it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.longest_s = 0.0  # since the start, or since the last reset
        self._since_s: float | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._since_s is not None:
            self.longest_s = max(self.longest_s, thread_time() - self._since_s)
        found: list[tuple[selectors.SelectorKey, int]] = super().select(timeout)
        self._since_s = thread_time()
        return found


class _HttpServer(uvicorn.Server):
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


def serve(config: ServerConfig) -> None:
    """Serve one model until SIGTERM or SIGINT.

    Raises:
        ConfigError: the engine can't be built, or the address can't be bound.
        EngineError: the engine ended too many times.
        KeyboardInterrupt: a signal arrived before the server was ready.
    """
    _run(config, None)


def serve_models(config: ModelsConfig) -> None:
    """Serve several models until SIGTERM or SIGINT. The errors are those of `serve`."""
    _run(config.server, config)


def _run(config: ServerConfig, models: ModelsConfig | None) -> None:
    logs, stretches = configure(config.log), _Stretches()
    try:
        with asyncio.Runner(loop_factory=partial(asyncio.SelectorEventLoop, stretches)) as runner:
            runner.run(_serve(config, stretches, models))
    finally:
        logs.stop()


async def _serve(config: ServerConfig, stretches: _Stretches, models: ModelsConfig | None) -> None:  # D316
    sock = listen(config.host, config.port)
    credentials = Credentials(config.access, config.tls, config.read_access)
    end = _End()
    if models is None:
        served: _OneModel | Fleet = await _OneModel.create(config, credentials, end)
    else:
        end.on_signals(None if config.read_access is None else credentials)
        served = await Fleet.create(models, credentials, partial(_unless, end))
    end.served = served
    ready = asyncio.create_task(served.start())
    server = _HttpServer(served.app)
    most = config.max_connections
    listener = server.listen(
        sock,
        credentials,
        max_connections=most,
        max_per_address=config.max_connections_per_address or -(-most // 2),
    )
    served.watch("kvq_http_connections", "Open connections.", lambda: listener.num_connections)
    served.watch(
        "kvq_http_longest_stretch_seconds",
        "Longest that the HTTP process computed without looking after its connections, since it was ready.",
        lambda: stretches.longest_s,
    )
    listening = asyncio.create_task(server.serve(sockets=[]))  # the listener passes connections to the server
    try:
        await asyncio.wait((ready, listening, end.came), return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            await ready
            await _settle(stretches)
            address, port = sock.getsockname()[:2]
            served.announce(f"{'http' if config.tls is None else 'https'}://{address}:{port}")
        await asyncio.wait((listening, end.came), return_when=asyncio.FIRST_COMPLETED)
        if listening.done():
            await listening
            raise EngineError("the server stopped listening")
        end.raise_reason()
        if not ready.done():
            raise KeyboardInterrupt
        grace_s = None if config.engine.get("hand_over_to") else config.grace_s
        log_event("draining", requests=served.num_active, grace_s=grace_s)
        await served.drain(grace_s)
    finally:
        ready.cancel()
        await asyncio.gather(ready, return_exceptions=True)
        await served.close()
        await server.end(listener, listening)
        log_event("ended")


class _End:
    """Shutdown of the server: handles the signals that request it, and stores the error that causes it."""

    def __init__(self) -> None:
        self.came: asyncio.Future[KVQError | None] = asyncio.get_running_loop().create_future()
        self.served: _OneModel | Fleet | None = None

    def set(self, reason: KVQError | None = None) -> None:
        """Request the shutdown; `reason`: the error that causes it, if any."""
        if not self.came.done():
            self.came.set_result(reason)

    def on_signals(self, credentials: Credentials | None) -> None:
        """Shut down on SIGTERM and SIGINT; reload `credentials`, if given, on SIGHUP."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        has_terminal = os.isatty(0)

        def hang_up(credentials: Credentials) -> None:
            if os.isatty(0) == has_terminal:
                credentials.read_again()
            else:  # SIGHUP was sent because the terminal was closed
                self._stop()

        if credentials is not None:
            loop.add_signal_handler(signal.SIGHUP, hang_up, credentials)

    def raise_reason(self) -> None:
        """Raise the error that caused the shutdown, if any."""
        if (reason := self.came.result()) is not None:
            raise reason

    def _stop(self) -> None:
        if self.served is not None and self.came.done():
            self.served.hurry()  # the second signal
        self.set()


class _OneModel:
    """The only model of a server, whose engine is starting. Made by `create`."""

    def __init__(
        self, service: Service, source: ModelSource, starting: "asyncio.Task[Ready]", app: FastAPI
    ) -> None:
        self.app = app
        self._service, self._source, self._starting = service, source, starting
        self.watch, self.drain, self.hurry = service.metrics.watch, service.drain, service.hurry

    @classmethod
    async def create(cls, config: ServerConfig, credentials: Credentials, end: "_End") -> "_OneModel":
        """Begin to start the engine, and create the service; if it can't be created, end the engine."""
        source, remote = make_remote(config, on_failed=end.set)
        end.on_signals(None if config.read_access is None else credentials)
        starting = asyncio.create_task(remote.start())
        try:
            tokenizer = await _unless(end, partial(load_without_torch, source.folder, config.chat_template))
            service = make_service(config, source.name, source.folder, remote, tokenizer)
            _log.info("tool calls: %s", service.tools.description)
        except BaseException:
            await remote.close()
            await asyncio.gather(starting, return_exceptions=True)
            raise
        service.kv_format_of = credentials.kv_format
        return cls(service, source, starting, create_app(service, config.access, credentials))

    @property
    def num_active(self) -> int:
        """Number of requests between their arrival and their answer."""
        return self._service.num_active

    async def start(self) -> None:
        """Wait until the engine and the readers are ready. Raises KVQError if one can't be started."""
        await asyncio.gather(self._starting, self._service.prompts.start())

    def announce(self, address: str) -> None:
        """Log what is served."""
        info, name = self._starting.result(), self._service.name
        log_event("model", served=name, source=str(self._source), digest=info.model_digest)
        _log.info("kvq serves %s on %s", name, address)

    async def close(self) -> None:
        """End the engine."""
        self._starting.cancel()
        await self._service.close()


async def _settle(stretches: _Stretches) -> None:
    """Collect garbage, exempt the remaining objects from later collections, and reset `longest_s`."""
    gc.collect()
    gc.freeze()  # otherwise every collection scans all objects of the libraries, which takes 50 ms
    await asyncio.sleep(0)  # ends this stretch, for which no client has waited
    stretches.longest_s = 0.0


async def _unless(end: _End, work: Callable[[], Any]) -> Any:
    """Run `work` in a thread and return its result; a shutdown does not wait for the thread.

    Raises:
        KeyboardInterrupt: a signal arrived before the result.
        KVQError: the server must shut down.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def run() -> None:
        try:
            finish = partial(done.set_result, work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            finish = partial(done.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: done.done() or finish())

    threading.Thread(target=run, name="kvq-load", daemon=True).start()
    await asyncio.wait((done, end.came), return_when=asyncio.FIRST_COMPLETED)
    if done.done():
        return done.result()
    done.cancel()
    end.raise_reason()
    raise KeyboardInterrupt
