"""Responses to generation requests, complete or as server-sent events, while the client is connected."""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response

from kvq.server.admission.prompts import Prompts
from kvq.server.admission.service import Service
from kvq.server.admission.slots import SequenceSlots
from kvq.server.http.guard import ADMITTED
from kvq.server.http.ignored import IGNORED, Body
from kvq.server.http.problems import Problem
from kvq.server.http.sending import EventStream, WholeAnswer, until_gone
from kvq.server.http.strict_json import DECODED

T = TypeVar("T")


class Call(ABC):
    """Generation request in one of the protocols."""

    slots: SequenceSlots  # engine slots that the request needs
    is_heavy = False  # True if encoding its response may take long, as with log-probabilities

    @abstractmethod
    async def answer(self) -> dict[str, Any]:
        """Return the complete response; raise Problem if the request can't be served or failed."""

    @abstractmethod
    def chunks(self) -> AsyncGenerator[dict[str, Any]]:
        """Yield chunks as they are generated; raise Problem if the request can't be served or failed."""


def tenant_of(request: Request) -> str:
    """Return a request's tenant: "" if the server has no keys, otherwise "key-" and the number of the key."""
    return str(request.scope.get("kvq_tenant", ""))


async def note_fields(request: Request, service: Service, body: Body) -> None:
    """List the ignored fields of a body in a response header, even if the request fails.

    Yield to the event loop before and after, because validating and converting a body both take time.

    Raises:
        Problem: the server is strict, and a field is unknown.
    """
    decoded = request.scope.pop(DECODED)
    await asyncio.sleep(0)
    names = await service.check_fields(decoded, body)
    decoded.clear()  # FastAPI keeps it until the end of the response
    if names:
        request.scope[IGNORED] = ", ".join(names)
    await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def text_request(
    request: Request, service: Service, body: Body, model: str | None
) -> AsyncIterator[Prompts]:
    """Admit a request that needs only the tokenizer, not the engine; yield the `Prompts` to use.

    Raises:
        Problem: the request is for another model or has a refused field, or its tenant is over a limit.
    """
    await note_fields(request, service, body)
    service.check_model(model)
    with service.text_request(tenant_of(request)):
        request.scope[ADMITTED] = True
        yield service.counting


async def respond(request: Request, service: Service, call: Call, *, stream: bool) -> Response:
    """Respond to a call if it can be admitted; cancel the call if the client disconnects.

    Raises:
        Problem: the call failed before anything was sent.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(service.enter(tenant_of(request), call.slots))
        request.scope[ADMITTED] = True
        cut = service.metrics.cuts.inc
        if stream:
            chunks = await _while_connected(request, _first_of(call.chunks()))
            if chunks is not None:
                return EventStream(chunks, request.url.path, on_cut=cut, on_end=stack.pop_all().close)
        else:
            content = await _while_connected(request, _encoded(call))
            if content is not None:
                return WholeAnswer(content, on_cut=cut, on_end=stack.pop_all().close)
    return Response(status_code=499)  # the client has disconnected


async def _encoded(call: Call) -> bytes:
    body = await call.answer()
    return await asyncio.to_thread(msgspec.json.encode, body) if call.is_heavy else msgspec.json.encode(body)


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`; if the client disconnects first, cancel the work and return None."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(until_gone(request.receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        for one in (task, watch):
            one.cancel()
            with contextlib.suppress(asyncio.CancelledError, Problem):
                await one


async def _first_of(chunks: AsyncGenerator[T]) -> AsyncGenerator[T]:
    """Wait for the first item: an early failure then becomes an error response, not a broken stream."""
    first = await anext(chunks, None)

    async def all_chunks() -> AsyncGenerator[T]:
        async with aclosing(chunks):
            if first is not None:
                yield first
            async for item in chunks:
                yield item

    return all_chunks()
