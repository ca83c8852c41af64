"""Requests on their way from the ingress to a replica, and the messages of their answers."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message

from kvq.errors import EngineError
from kvq.server.http.incoming import MAX_BODY, too_large

_log = logging.getLogger("kvq")
_HOP = (b"connection", b"content-length", b"expect", b"keep-alive", b"te", b"transfer-encoding", b"upgrade")
_TEXTS = ("tools", "system", "messages")  # of a conversation, in the order in which templates write them


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayedRequest:
    """An HTTP request, its body included. Ray's prefix router looks for `prompt`."""

    method: str
    path: str  # below the application's prefix
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    client: tuple[str, int] | None
    body: bytes
    prompt: str = ""  # a text that begins alike where the model's prompt does; "": it has none

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
    """Return a request with its whole body.

    Raises:
        Problem: it is larger than any server of kvq's takes.
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
    """Return a text that begins like another body's where their prompts do; "" for what has no prompt.

    Conversations count as the JSON of all that templates write: a prefix of tokens is one of that text.
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
    """Yield what an application sends for a request. Leaving early cancels it, as if the client left.

    Nothing slows it down: what is sent faster than it is read lies in memory, up to the answer's end.

    Raises:
        EngineError: it failed before its answer was whole.
    """
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    bodies = [relayed.body]

    async def receive() -> Message:
        if not bodies:
            await asyncio.Event().wait()  # until it is cancelled
        return {"type": "http.request", "body": bodies.pop(), "more_body": False}

    async def send(message: Message) -> None:
        sent.put_nowait(message)

    async def run() -> None:
        try:
            await app(relayed.scope(), receive, send)
        except Exception:  # noqa: BLE001 - its text may quote a prompt, which the logger leaves out
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
