"""Replica: the application of `kvq serve` with a separate engine, without a listener."""

import asyncio
import os
from collections.abc import AsyncGenerator
from functools import partial

from starlette.types import Message

from kvq.errors import KVQError
from kvq.integrations.ray.relay import Lost, RelayedRequest, relay
from kvq.models.loading.tokenizer import load_without_torch
from kvq.server.admission.config import ServerConfig
from kvq.server.app import create_app
from kvq.server.assembly import make_remote, make_service
from kvq.server.health import check_readiness
from kvq.server.http.problems import Problem
from kvq.server.logs import configure, log_event

_END_S = 0.5  # time to respond to the requests of an engine that ended


class EngineReplica:  # D347: the HTTP process without its listener
    """Actor that Ray starts, monitors and ends. The engine is a separate process that ends with the actor."""

    async def __init__(self, config: ServerConfig) -> None:  # type: ignore[misc]  # Ray awaits it
        """Start the engine and wait until it is ready.

        Raises:
            KVQError: the engine can't be started.
        """
        configure(config.log)
        is_ready = False

        def give_up(reason: KVQError) -> None:
            log_event("no engine", reason=str(reason))
            if is_ready:  # Ray then stops sending requests here, and starts another replica
                asyncio.get_running_loop().call_later(_END_S, partial(os._exit, 1))

        source, self._remote = make_remote(config, on_failed=give_up)
        tokenizer = await asyncio.to_thread(load_without_torch, source.folder, config.chat_template)
        self._service = make_service(config, source.name, source.folder, self._remote, tokenizer)
        try:
            await asyncio.gather(self._remote.start(), self._service.prompts.start())
        except BaseException:
            await self._service.close()
            raise
        is_ready = True
        self._app = create_app(self._service, config.access)

    async def answer(self, relayed: RelayedRequest) -> AsyncGenerator[Message]:
        """Yield the response messages that the application sends for a request.

        Raises:
            Lost: this replica can't accept requests, or the engine ended before the response started.
        """
        messages = relay(self._app, relayed)
        async for message in messages:
            reason = self._service.why_not_ready
            if reason is not None and message.get("status") == 503:
                await messages.aclose()
                raise Lost(reason)
            yield message

    async def check_health(self) -> None:  # D348: a replica ends with its engine
        """Raise RuntimeError if `/health/ready` would report an error."""
        try:
            await check_readiness(self._service)
        except Problem as problem:
            raise RuntimeError(problem.message) from None
