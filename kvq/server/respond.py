"""From a call's answer to HTTP: whole or as server-sent events, for as long as somebody reads it."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import msgspec
from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel

from kvq.server.dialects import dialect_of
from kvq.server.event_stream import EventStream
from kvq.server.guard import ADMITTED
from kvq.server.ignored import IGNORED
from kvq.server.seating import Seats
from kvq.server.service import Service
from kvq.server.streams import first_of, while_connected
from kvq.server.strict_json import DECODED
from kvq.server.whole_answer import WholeAnswer


class Call(Protocol):
    """One request of an API that generates."""

    @property
    def seats(self) -> Seats:
        """What it needs at the engine."""

    @property
    def is_heavy(self) -> bool:
        """Whether its whole answer may take long to encode, as log-probabilities do."""

    async def answer(self) -> dict[str, Any]:
        """The whole answer. Raises Problem: it can't be served, or failed."""

    def chunks(self) -> AsyncGenerator[dict[str, Any]]:
        """The answer in pieces, as they come. Raises Problem: it can't be served, or failed on the way."""


def tenant(request: Request) -> str:
    """Who asks: "" without keys, otherwise "key-" and the number of the key."""
    return str(request.scope.get("kvq_tenant", ""))


@contextlib.contextmanager
def admitted(request: Request, entered: AbstractContextManager[None]) -> Iterator[None]:
    """While `entered`; the request was charged for with that."""
    with entered:
        request.scope[ADMITTED] = True
        yield


async def note_fields(request: Request, service: Service, body: BaseModel) -> None:
    """Name fields of a body that are ignored in the answer's head, whatever the answer will be.

    Others have their turn before and after: a body was just checked, and is to be taken apart.

    Raises:
        Problem: the server is strict, and refuses one.
    """
    decoded = request.scope.pop(DECODED)
    await asyncio.sleep(0)
    ignored = service.check_fields(decoded, body)
    decoded.clear()  # FastAPI holds it until the answer's end
    if ignored.fields:
        request.scope[IGNORED] = ignored.header()
    await asyncio.sleep(0)


async def respond(request: Request, service: Service, call: Call, *, stream: bool) -> Response:
    """Answer a call if there is room for it; it is cancelled when the client goes.

    Raises:
        Problem: it failed before anything was sent.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(admitted(request, service.enter(tenant(request), call.seats)))
        cut = service.metrics.cut
        if stream:
            chunks = await while_connected(request, first_of(call.chunks()))
            if chunks is not None:
                dialect = dialect_of(request.url.path)
                return EventStream(chunks, dialect, on_cut=cut, on_end=stack.pop_all().close)
        else:
            content = await while_connected(request, _encoded(call))
            if content is not None:
                return WholeAnswer(content, on_cut=cut, on_end=stack.pop_all().close)
    return Response(status_code=499)  # nobody reads it


async def _encoded(call: Call) -> bytes:
    body = await call.answer()
    return await asyncio.to_thread(msgspec.json.encode, body) if call.is_heavy else msgspec.json.encode(body)
