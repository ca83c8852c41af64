"""Responses to generation requests, whole or as server-sent events, to clients that may be slow or gone."""

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from kvq.server.admission.prompts import Prompts
from kvq.server.admission.service import Service
from kvq.server.admission.slots import SequenceSlots
from kvq.server.http.guard import ADMITTED
from kvq.server.http.ignored import IGNORED, Body
from kvq.server.http.problems import (
    OVERFLOWN,
    Overload,
    Problem,
    error_object,
    event_of,
    failed,
    is_ollama_path,
    last_event,
)
from kvq.server.http.strict_json import DECODED

T = TypeVar("T")
_log = logging.getLogger("kvq")
_MAX_BEHIND = 24 << 10  # bytes; the connection may buffer as much again, in addition to its own 8 KiB
_PATIENCE_S = 2.0  # maximum wait for a client that is this far behind
_PIECE = 64 << 10  # bytes of a JSON response that are sent at a time
_PIECE_S = 10.0  # limit for a client to read a piece


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
    try:
        return await _admitted(request, service, call, stream=stream)
    except Overload:
        if (response := await _overflowed(request, service)) is None:
            raise
        return response


async def _overflowed(request: Request, service: Service) -> Response | None:
    """Return the upstream's response to a refused request, or None if it does not take it."""
    if (overflow := service.overflow) is None or OVERFLOWN in request.headers:
        return None
    tenant, path = service.admission.tenants[tenant_of(request)], request.url.path
    raw, answer = await request.body(), None

    async def take() -> dict[str, Any] | AsyncGenerator[dict[str, Any]] | None:
        taken = await overflow.take(path, raw, tenant.charge)
        return taken if taken is None or isinstance(taken, dict) else await _first_of(taken)

    with contextlib.suppress(Problem):  # it broke off before anything was sent
        answer = await while_connected(request.receive, take())
    if answer is None:
        return None
    tenant.charge_request()
    end = dict[str, Any](on_cut=service.metrics.cuts.inc, on_end=lambda: None)
    response: Response
    if isinstance(answer, dict):
        response = _WholeAnswer(msgspec.json.encode(answer), **end)
    else:
        response = _EventStream(answer, path, **end)
    response.headers[OVERFLOWN] = "1"
    return response


async def _admitted(request: Request, service: Service, call: Call, *, stream: bool) -> Response:
    with contextlib.ExitStack() as stack:
        if (tracing := service.tracing) is not None:
            where, headers = request.url.path, request.headers
            stack.enter_context(tracing.request(where, headers, model=service.name, stream=stream))
        stack.enter_context(service.enter(tenant_of(request), call.slots))
        request.scope[ADMITTED] = True
        cut = service.metrics.cuts.inc
        if stream:
            chunks = await while_connected(request.receive, _first_of(call.chunks()))
            if chunks is not None:
                return _EventStream(chunks, request.url.path, on_cut=cut, on_end=stack.pop_all().close)
        else:
            content = await while_connected(request.receive, _encoded(call))
            if content is not None:
                return _WholeAnswer(content, on_cut=cut, on_end=stack.pop_all().close)
    return Response(status_code=499)  # the client has disconnected


async def _encoded(call: Call) -> bytes:
    body = await call.answer()
    return await asyncio.to_thread(msgspec.json.encode, body) if call.is_heavy else msgspec.json.encode(body)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`; if the client disconnects first, cancel the work and return None."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_until_gone(receive))
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


class _WholeAnswer(Response):
    """JSON response, sent as fast as the client reads; disconnects clients that read no piece for 10 s."""

    media_type = "application/json"

    def __init__(self, content: bytes, *, on_cut: Callable[[], object], on_end: Callable[[], object]) -> None:
        """`on_cut` is called if the client reads too slowly, `on_end` when nothing is left to send."""
        super().__init__(content)
        self._on_cut = on_cut
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the content until the end, or until the client stops reading."""
        content = bytes(self.body)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            for start in range(0, len(content), _PIECE):
                end = start + _PIECE
                piece = {"body": content[start:end], "more_body": end < len(content)}
                async with asyncio.timeout(_PIECE_S):
                    await send({"type": "http.response.body", **piece})
        except TimeoutError:
            _cut_off(scope, self._on_cut)
        finally:
            self._on_end()


class _EventStream(Response):
    """Streamed response; each chunk is sent as soon as it is generated.

    A client that falls too far behind is disconnected, and its request is cancelled. If the request fails,
    the last event is an error object.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[dict[str, Any]],
        path: str,
        *,
        on_cut: Callable[[], object] = lambda: None,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        """`path`: the request's path, which determines the protocol. `on_cut` is called if the client reads
        too slowly, `on_end` when the stream ends.
        """
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        if is_ollama_path(path):
            self.headers["content-type"] = "application/x-ndjson"
        self._chunks = chunks
        self._path = path
        self._on_cut = on_cut
        self._on_end = on_end
        self._waiting: list[bytes] = []
        self._num_bytes = 0
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()
        self._is_over = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send chunks until the end, or until the client stops reading."""
        work = (self._fill(scope), self._send(send), _until_gone(receive))
        tasks = [asyncio.create_task(one) for one in work]
        sending = tasks[1]
        try:
            await asyncio.wait(tasks[1:], return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                await sending
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._chunks.aclose()
            self._on_end()

    async def _fill(self, scope: Scope) -> None:
        """Encode chunks as they arrive; pause while the client is too far behind."""
        try:
            async with aclosing(self._chunks):
                async for chunk in self._chunks:
                    await self._wait_for_room()
                    self._put(event_of(chunk, self._path))
            self._put(last_event(self._path))
        except TimeoutError:
            _cut_off(scope, self._on_cut)
        except Problem as problem:
            self._put_error(problem)
        except Exception as error:  # noqa: BLE001 - the answer has begun, so the error is a part of it
            _log.exception("a stream failed")
            self._put_error(failed(f"the server failed: {type(error).__name__}"))
        finally:
            self._is_over = True
            self._changed.set()

    async def _send(self, send: Send) -> None:
        """Send all queued events together; wait while the connection's buffer is full."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while True:
            await self._changed.wait()
            self._changed.clear()
            body, self._waiting, self._num_bytes = b"".join(self._waiting), [], 0
            more = not self._is_over
            self._taken.set()
            await send({"type": "http.response.body", "body": body, "more_body": more})
            if not more:
                return

    async def _wait_for_room(self) -> None:
        """Wait until the client has read more; a single step may produce more than fits in the buffer."""
        if self._num_bytes <= _MAX_BEHIND:
            return
        async with asyncio.timeout(_PATIENCE_S):
            while self._num_bytes > _MAX_BEHIND:
                self._taken.clear()
                await self._taken.wait()

    def _put(self, event: bytes) -> None:
        self._waiting.append(event)
        self._num_bytes += len(event)
        self._changed.set()

    def _put_error(self, problem: Problem) -> None:
        self._put(event_of(error_object(problem, self._path), self._path))


def _cut_off(scope: Scope, on_cut: Callable[[], object]) -> None:
    """Abort the connection of a client that reads too slowly, and discard all unsent data."""
    on_cut()
    transport = scope.get("state", {}).get("kvq_transport")
    if transport is not None:
        transport.abort()


async def _until_gone(receive: Receive) -> None:
    """Return once the client has disconnected; discard all data received until then."""
    while (await receive())["type"] != "http.disconnect":
        pass
