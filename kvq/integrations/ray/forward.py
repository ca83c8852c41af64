"""Forwards answers of replicas.

The request of a lost replica goes to another one; an answer that has begun ends with an error object.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from kvq.integrations.ray.relay import RelayedRequest
from kvq.server.http.guard import as_response
from kvq.server.http.problems import dialect_of, unavailable

_ATTEMPTS = 5
_PAUSE_S = 0.1  # before the second, doubled before each one after


class Lost(Exception):
    """A replica that has ended, or is about to; others may answer."""


async def forward(
    relayed: RelayedRequest,
    send: Callable[[RelayedRequest], AsyncGenerator[Message]],
    *,
    pause_s: float = _PAUSE_S,
) -> Response:
    """Return the answer of the first replica that begins one. `send` asks one that a router chooses."""
    reason = ""
    for attempt in range(_ATTEMPTS):
        if attempt:
            await asyncio.sleep(pause_s * 2 ** (attempt - 1))
        messages = send(relayed)
        try:
            return _Relayed(await anext(messages), messages, relayed.path)
        except Lost as lost:
            reason = str(lost)
    return as_response(unavailable(reason), relayed.path)


class _Relayed(Response):
    """An answer that has begun."""

    def __init__(self, head: Message, rest: AsyncGenerator[Message], path: str) -> None:
        self.status_code = head["status"]
        self._head = head
        self._rest = rest
        self._dialect = dialect_of(path)
        self._is_stream = any(
            name == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in head["headers"]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on as it comes. A stream whose replica is lost ends with an error object.

        Raises:
            Lost: the replica of an answer that is no stream, which breaks off.
        """
        async with aclosing(self._rest):
            await send(self._head)
            try:
                async for message in self._rest:
                    await send(message)
            except Lost as lost:
                if not self._is_stream:
                    raise
                event = self._dialect.event(self._dialect.error(unavailable(str(lost))))
                await send({"type": "http.response.body", "body": event, "more_body": False})
