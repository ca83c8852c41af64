"""From a call's answer to HTTP: whole or as server-sent events, for as long as somebody reads it."""

import contextlib
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from kvq.server.dialects import dialect_of
from kvq.server.event_stream import EventStream
from kvq.server.service import Service
from kvq.server.streams import first_of, while_connected


class Call(Protocol):
    """One request of an API that generates."""

    @property
    def num_sequences(self) -> int:
        """How many it generates."""

    async def answer(self) -> dict[str, Any]:
        """The whole answer. Raises Problem: it can't be served, or failed."""

    def chunks(self) -> AsyncGenerator[dict[str, Any]]:
        """The answer in pieces, as they come. Raises Problem: it can't be served, or failed on the way."""


def tenant(request: Request) -> str:
    """Who asks: "" without keys, otherwise "key-" and the number of the key."""
    return str(request.scope.get("kvq_tenant", ""))


async def respond(request: Request, service: Service, call: Call, *, stream: bool) -> Response:
    """Answer a call if there is room for it; it is cancelled when the client goes.

    Raises:
        Problem: it failed before anything was sent.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(service.enter(tenant(request), call.num_sequences))
        if stream:
            chunks = await while_connected(request, first_of(call.chunks()))
            if chunks is not None:
                dialect, cut = dialect_of(request.url.path), service.metrics.cut
                return EventStream(chunks, dialect, on_cut=cut, on_end=stack.pop_all().close)
        else:
            body = await while_connected(request, call.answer())
            if body is not None:
                return JSONResponse(body)
    return Response(status_code=499)  # nobody reads it
