"""`kvq serve`: the HTTP process from its start to its end."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from kvq.errors import ConfigError, EngineError
from kvq.models.resolve import resolve_model
from kvq.models.weights import load_tokenizer
from kvq.server.app import create_app
from kvq.server.messages import Start
from kvq.server.prompts import Prompts
from kvq.server.protocol import Connection, prepare
from kvq.server.remote import Remote
from kvq.server.service import Service

_log = logging.getLogger("kvq")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_END_S = 2  # for answers to be written after the engine is gone


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """How a server is reached, and what it serves."""

    model: str = "tiny"
    kv: str = "auto"
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_keys: frozenset[str] = frozenset()
    grace_s: float = 30.0  # for running requests after SIGTERM
    engine: dict[str, Any] = field(default_factory=dict)  # options of `kvq.LLM`

    def __post_init__(self) -> None:
        if self.host not in _LOOPBACK and not self.api_keys:
            raise ConfigError(
                f"--host {self.host} can be reached from other machines: give --api-key-file, "
                f"or stay on 127.0.0.1"
            )
        if not self.grace_s >= 0:
            raise ConfigError(f"the grace period must be at least 0 seconds, got {self.grace_s}")


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
    """
    asyncio.run(_serve(config))


async def _serve(config: ServerConfig) -> None:
    listener = _listen(config)
    folder = resolve_model(
        config.model, revision=config.engine.get("revision"), token=config.engine.get("token")
    )
    prompts = Prompts(load_tokenizer(folder))
    ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

    def end(reason: str | None = None) -> None:
        if not ended.done():
            ended.set_result(reason)

    options = {name: value for name, value in config.engine.items() if name not in ("revision", "token")}
    start = Start(model=str(folder), kv=config.kv, options=options)
    remote = Remote(start, on_failed=end)
    name = config.served_model_name or config.model.rstrip("/").rsplit("/", 1)[-1]
    service = Service(name, remote, prompts)
    server = _Server(
        uvicorn.Config(
            create_app(service, api_keys=config.api_keys),
            log_level="warning",
            access_log=False,
            server_header=False,
            http=Connection,
            ws="none",
            timeout_graceful_shutdown=_END_S,
        )
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end)
    listening = asyncio.create_task(server.serve(sockets=[listener]))
    starting = asyncio.create_task(remote.start())
    try:
        await asyncio.wait((starting, ended), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
            _log.warning("kvq serves %s on http://%s:%d", name, *listener.getsockname()[:2])
        reason = await ended
        if reason is not None:
            raise EngineError(reason)
        await service.drain(config.grace_s)
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await service.close()
        server.should_exit = True
        await listening


def _listen(config: ServerConfig) -> socket.socket:
    """Take the address before anything is loaded; clients wait in line from here on.

    Raises:
        ConfigError: it can't be had.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(f"can't listen on {config.host}:{config.port}: {error.strerror}") from error
    prepare(listener)
    return listener


def read_keys(path: Path) -> frozenset[str]:
    """API keys from a file, one a line.

    Raises:
        ConfigError: no such file, no key in it, or others may read it.
    """
    try:
        mode = os.stat(path).st_mode
        keys = frozenset(
            line.strip() for line in path.read_text(encoding="utf8").splitlines() if line.strip()
        )
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    if not keys:
        raise ConfigError(f"{path} holds no API key; write one a line")
    if mode & 0o077:
        raise ConfigError(f"{path} can be read by others; run chmod 600 {path}")
    return keys
