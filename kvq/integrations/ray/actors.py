"""Actors of the Ray application: replicas of `kvq serve` without a listener, and the ingress before them."""

import asyncio
import os
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from ray.exceptions import RayActorError, RayTaskError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from kvq.errors import KVQError
from kvq.integrations.ray.relay import Lost, RelayedRequest, forward, read, relay
from kvq.models.loading.tokenizer import load_without_torch
from kvq.server.admission.config import ServerConfig
from kvq.server.app import create_app
from kvq.server.assembly import make_remote, make_service
from kvq.server.health import check_readiness
from kvq.server.http.guard import as_response
from kvq.server.http.problems import Problem
from kvq.server.logs import configure, log_event

_END_S = 0.5  # time to respond to the requests of an engine that ended
_ENDED = "the replica ended; send the request again"


class EngineReplica:  # D347: the HTTP process without its listener
    """Replica that Ray starts, monitors and ends. The engine is a separate process that ends with it."""

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


class Ingress:
    """Process that forwards requests from Ray's proxy to the replicas, through their router.

    It reads request bodies, because routers need the prompts, but does not validate them.
    """

    def __init__(self, engines: Any) -> None:
        """`engines`: handle of the deployment of replicas."""
        self._engines = engines.options(stream=True, method_name="answer")

    async def __call__(self, request: Request) -> Response:
        """Forward a request from Ray's proxy, and return the response."""
        try:
            relayed = await read(request)
        except Problem as problem:
            return as_response(problem, request.url.path)
        return await forward(relayed, self._send)

    async def _send(self, relayed: RelayedRequest) -> AsyncGenerator[Message]:
        """Yield the messages of the replica chosen by the router: by prompt or, without a prompt, by load.

        Raises:
            Lost: the chosen replica has ended or is about to end.
        """
        answer = self._engines.remote(relayed) if relayed.prompt else self._engines.remote(relayed=relayed)
        is_whole = False
        try:
            async for message in answer:
                yield message
            is_whole = True
        except RayActorError as error:
            raise Lost(_ENDED) from error
        except RayTaskError as error:
            if isinstance(error.cause, Lost):
                raise Lost(str(error.cause)) from None
            raise
        finally:
            if not is_whole:
                answer.cancel()
