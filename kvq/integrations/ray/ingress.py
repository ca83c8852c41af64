"""Ingress: the process that forwards requests from Ray's proxy to the replicas, through their router."""

from collections.abc import AsyncGenerator
from typing import Any

from ray.exceptions import RayActorError, RayTaskError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from kvq.integrations.ray.relay import Lost, RelayedRequest, forward, read
from kvq.server.http.guard import as_response
from kvq.server.http.problems import Problem

_ENDED = "the replica ended; send the request again"


class Ingress:
    """Ingress that reads request bodies, because routers need the prompts, but does not validate them."""

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
