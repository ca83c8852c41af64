"""`kvq serve`: the HTTP process from its start to its end."""

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI

from kvq.errors import ConfigError, EngineError, KVQError
from kvq.models.loading.tokenizer import load_without_torch
from kvq.server.admission.config import ServerConfig
from kvq.server.admission.service import Service
from kvq.server.app import create_app
from kvq.server.assembly import make_remote, make_service
from kvq.server.http.credentials import Credentials
from kvq.server.http.listener import Door
from kvq.server.http.logs import configure, log_event
from kvq.server.http.loop_budget import Stretches
from kvq.server.http.protocol import Connection, prepare

_log = logging.getLogger("kvq")
_END_S = 0.3  # for answers to be written after the engine is gone
_STUCK_S = 2  # for all to be closed after that


class _Server(uvicorn.Server):
    """Leaves signals to us: what runs is served to its end before the sockets are closed."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(config: ServerConfig) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: the engine can't be built, or the address can't be bound.
        EngineError: the engine ended more often than it may.
        KeyboardInterrupt: it was told to end before it was ready.
    """
    logs, stretches = configure(config.log), Stretches()
    try:
        with asyncio.Runner(loop_factory=stretches.make_loop) as runner:
            runner.run(_serve(config, stretches))
    finally:
        logs.stop()


async def _serve(config: ServerConfig, stretches: Stretches) -> None:
    listener = listen(config)
    credentials = Credentials(config.access, config.tls, config.read_access)
    ended: asyncio.Future[KVQError | None] = asyncio.get_running_loop().create_future()

    def end(reason: KVQError | None = None) -> None:
        if not ended.done():
            ended.set_result(reason)

    source, remote = make_remote(config, on_failed=end)
    services: list[Service] = []

    def stop() -> None:
        for service in services if ended.done() else ():
            service.hurry()  # asked twice
        end()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    has_terminal = os.isatty(0)

    def hang_up() -> None:  # told by somebody, or because the terminal was closed
        credentials.read_again() if os.isatty(0) == has_terminal else stop()

    if config.read_access is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hang_up)
    starting = asyncio.create_task(remote.start())
    try:
        tokenizer = await _unless(ended, partial(load_without_torch, source.folder, config.chat_template))
        service = make_service(config, source.name, source.folder, remote, tokenizer)
        _log.info("tool calls: %s", service.tools.description)
    except BaseException:
        await remote.close()
        await asyncio.gather(starting, return_exceptions=True)
        raise
    services.append(service)
    ready = asyncio.gather(starting, service.prompts.start())
    server = _Server(_uvicorn(create_app(service, config.access, credentials)))
    door = _open(config, server, listener, credentials)
    service.metrics.watch("kvq_http_connections", "Open connections.", lambda: door.num_connections)
    service.metrics.watch(
        "kvq_http_longest_stretch_seconds",
        "Longest that the HTTP process computed without looking after its connections, since it was ready.",
        lambda: stretches.longest_s,
    )

    listening = asyncio.create_task(server.serve(sockets=[]))  # the door hands it connections
    try:
        await asyncio.wait((ready, listening, ended), return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            info, _ = await ready
            gc.collect()
            gc.freeze()  # else a collection looks through all the libraries' objects, which takes 50 ms
            await asyncio.sleep(0)  # nobody waited yet for all that
            stretches.longest_s = 0.0
            log_event("model", served=service.name, source=str(source), digest=info.model_digest)
            scheme = "http" if config.tls is None else "https"
            address, port = listener.getsockname()[:2]
            _log.info("kvq serves %s on %s://%s:%d", service.name, scheme, address, port)
        await asyncio.wait((listening, ended), return_when=asyncio.FIRST_COMPLETED)
        if listening.done():
            await listening
            raise EngineError("the server stopped listening")
        reason = await ended
        if reason is not None:
            raise reason
        if not ready.done():
            raise KeyboardInterrupt
        log_event("draining", requests=service.num_active, grace_s=config.grace_s)
        await service.drain(config.grace_s)
    finally:
        ready.cancel()
        await asyncio.gather(ready, return_exceptions=True)
        await service.close()
        door.close()
        server.should_exit = True
        asyncio.get_running_loop().call_later(_END_S, door.drop_all)
        await listening
        log_event("ended")


async def _unless(ended: "asyncio.Future[KVQError | None]", work: Callable[[], Any]) -> Any:
    """What `work` returns, in a thread that nobody waits for if the server is to end meanwhile.

    Raises:
        KeyboardInterrupt: it was told to.
        KVQError: it has to.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def run() -> None:
        try:
            tell = partial(done.set_result, work())
        except BaseException as error:  # noqa: BLE001 - for who waits
            tell = partial(done.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: done.done() or tell())

    threading.Thread(target=run, name="kvq-load", daemon=True).start()
    await asyncio.wait((done, ended), return_when=asyncio.FIRST_COMPLETED)
    if done.done():
        return done.result()
    done.cancel()
    if (reason := ended.result()) is not None:
        raise reason
    raise KeyboardInterrupt


def _open(
    config: ServerConfig, server: uvicorn.Server, listener: socket.socket, credentials: Credentials
) -> Door:
    """Let connections in, to uvicorn's protocol."""
    server.config.load()
    door = Door(
        listener,
        tls=None if config.tls is None else lambda: credentials.context,
        max_connections=config.max_connections,
        max_per_address=config.max_connections_per_address or -(-config.max_connections // 2),
    )
    door.open(partial(Connection, server.config, server.server_state, {}, asyncio.get_running_loop()))
    return door


def _uvicorn(app: FastAPI) -> uvicorn.Config:
    app.openapi()  # made once, which takes long: not while somebody waits
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        http=Connection,
        ws="none",
        timeout_graceful_shutdown=_STUCK_S,
    )


def listen(config: ServerConfig) -> socket.socket:
    """Take the address before anything is loaded; clients wait in line from here on.

    Raises:
        ConfigError: it can't be had.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family, backlog=1024)
    except OSError as error:
        why = error.strerror
        if error.errno == errno.EADDRINUSE:
            why = "another program has that port; end it, or give another --port"
        raise ConfigError(f"can't listen on {config.host}:{config.port}: {why}") from error
    prepare(listener)
    return listener
