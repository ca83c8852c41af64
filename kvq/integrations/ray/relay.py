"""Relay of requests from the ingress to a replica, and of response messages back.

If a replica is lost, its requests are sent to another replica; streams in progress end with an error object.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvq.errors import EngineError
from kvq.server.http.guard import as_response
from kvq.server.http.incoming import MAX_BODY, too_large
from kvq.server.http.problems import error_object, event_of, unavailable

_log = logging.getLogger("kvq")
_HOP = (b"connection", b"content-length", b"expect", b"keep-alive", b"te", b"transfer-encoding", b"upgrade")
_TEXTS = ("tools", "system", "messages")  # fields of a conversation, in the order of rendering
_ATTEMPTS = 5
_PAUSE_S = 0.1  # before the second attempt; doubled before each later one


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayedRequest:
    """HTTP request, including its body. Ray's prefix router reads `prompt`."""

    method: str
    path: str  # relative to the application's route prefix
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    client: tuple[str, int] | None
    body: bytes
    prompt: str = ""  # text for prefix routing, see `prompt_of`; "": no prompt

    def scope(self) -> dict[str, Any]:
        """Return the request as an ASGI scope."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "query_string": self.query,
            "headers": [*self.headers, (b"content-length", b"%d" % len(self.body))],
            "client": self.client,
            "server": None,
            "state": {},
        }


async def read(request: Request) -> RelayedRequest:
    """Return a request with its complete body.

    Raises:
        Problem: the body is larger than any kvq server accepts.
    """
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY:
            raise too_large(MAX_BODY)
    scope = request.scope
    return RelayedRequest(
        method=request.method,
        path=scope["path"].removeprefix(scope.get("root_path", "").rstrip("/")),
        query=scope["query_string"],
        headers=tuple((name, value) for name, value in scope["headers"] if name not in _HOP),
        client=scope.get("client"),
        body=bytes(body),
        prompt=prompt_of(bytes(body)),
    )


def prompt_of(body: bytes) -> str:
    """Return a text for prefix matching: bodies whose prompts share a prefix have texts that share a prefix.

    For conversations, this is the JSON of all fields that templates render. Without a prompt, return "".
    """
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        given = msgspec.json.decode(body)
        if isinstance(given, dict):
            prompt = given.get("prompt")
            if isinstance(prompt, str):
                return prompt
            found = prompt or [given[name] for name in _TEXTS if given.get(name)]
            return msgspec.json.encode(found).decode() if found else ""
    return ""


async def relay(app: ASGIApp, relayed: RelayedRequest) -> AsyncGenerator[Message]:
    """Yield an application's messages for a request. Closing the generator early cancels the request.

    There is no flow control: messages that the application sends faster than they are read stay in memory.

    Raises:
        EngineError: the application failed before the response was complete.
    """
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    bodies = [relayed.body]

    async def receive() -> Message:
        if not bodies:
            await asyncio.Event().wait()  # until this task is cancelled
        return {"type": "http.request", "body": bodies.pop(), "more_body": False}

    async def send(message: Message) -> None:
        sent.put_nowait(message)

    async def run() -> None:
        try:
            await app(relayed.scope(), receive, send)
        except Exception:  # noqa: BLE001 - the text may quote a prompt, which the logger leaves out
            _log.exception("an answer failed")
        finally:
            sent.put_nowait(None)

    task = asyncio.create_task(run())
    is_whole = False
    try:
        while (message := await sent.get()) is not None:
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)
            yield message
        if not is_whole:
            raise EngineError("the server failed; send the request again")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Lost(Exception):
    """Error: a replica has ended or is about to end; another replica may serve the request."""


async def forward(
    relayed: RelayedRequest,
    send: Callable[[RelayedRequest], AsyncGenerator[Message]],
    *,
    pause_s: float = _PAUSE_S,
) -> Response:
    """Return the response of the first replica that starts one. `send` uses a replica chosen by a router."""
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
    """Response of a replica whose headers have arrived; the body is relayed as it arrives."""

    def __init__(self, head: Message, rest: AsyncGenerator[Message], path: str) -> None:
        self.status_code = head["status"]
        self._head = head
        self._rest = rest
        self._path = path
        self._is_stream = any(
            name == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in head["headers"]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Relay the response as it arrives. A stream whose replica is lost ends with an error object.

        Raises:
            Lost: the replica was lost during a response that is not a stream.
        """
        async with aclosing(self._rest):
            await send(self._head)
            try:
                async for message in self._rest:
                    await send(message)
            except Lost as lost:
                if not self._is_stream:
                    raise
                event = event_of(error_object(unavailable(str(lost)), self._path), self._path)
                await send({"type": "http.response.body", "body": event, "more_body": False})
