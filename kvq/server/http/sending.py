"""Responses, sent as one JSON body or as server-sent events to clients that may be slow or disconnect."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvq.server.http.problems import Problem, error_object, event_of, failed, is_ollama_path, last_event

_log = logging.getLogger("kvq")
MAX_BEHIND = 24 << 10  # bytes; the connection may buffer as much again, in addition to its own 8 KiB
_PATIENCE_S = 2.0  # maximum wait for a client that is this far behind
_PIECE = 64 << 10  # bytes of a JSON response that are sent at a time
_PIECE_S = 10.0  # limit for a client to read a piece


class WholeAnswer(Response):
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


class EventStream(Response):
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
        work = (self._fill(scope), self._send(send), until_gone(receive))
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
        if self._num_bytes <= MAX_BEHIND:
            return
        async with asyncio.timeout(_PATIENCE_S):
            while self._num_bytes > MAX_BEHIND:
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


async def until_gone(receive: Receive) -> None:
    """Return once the client has disconnected; discard all data received until then."""
    while (await receive())["type"] != "http.disconnect":
        pass
