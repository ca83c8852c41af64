"""From a call's answer to HTTP: whole or as server-sent events, for as long as somebody reads it."""

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from kvq.server.streams import events, first_of, while_connected


class Call(Protocol):
    """One request of an API that generates."""

    async def answer(self) -> dict[str, Any]:
        """The whole answer. Raises Problem: it can't be served, or failed."""

    def chunks(self) -> AsyncGenerator[dict[str, Any]]:
        """The answer in pieces, as they come. Raises Problem: it can't be served, or failed on the way."""


def tenant(request: Request) -> str:
    """Who asks: "" without keys, otherwise "key-" and the number of the key."""
    return str(request.scope.get("kvq_tenant", ""))


async def respond(request: Request, call: Call, *, stream: bool) -> Response:
    """Answer a call; it is cancelled when the client goes.

    Raises:
        Problem: it failed before anything was sent.
    """
    if stream:
        chunks = await while_connected(request, first_of(call.chunks()))
        if chunks is not None:
            return StreamingResponse(events(chunks), media_type="text/event-stream")
    else:
        body = await while_connected(request, call.answer())
        if body is not None:
            return JSONResponse(body)
    return Response(status_code=499)  # nobody reads it
