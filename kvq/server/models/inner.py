"""Requests that the server makes to an application in its own process."""

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Scope

_KEPT = ("type", "asgi", "http_version", "method", "scheme", "path", "query_string", "headers", "kvq_tenant")


async def ask(app: ASGIApp, scope: Scope, changes: Mapping[str, Any]) -> tuple[int, bytes]:
    """Return the status and the body of an application's answer. `changes`: keys that differ from `scope`."""
    own = {key: scope[key] for key in _KEPT if key in scope} | {"state": {}, **changes}
    own["raw_path"] = own["path"].encode()
    given: list[Message] = [{"type": "http.request", "body": b"{}", "more_body": False}]
    status, body = 0, bytearray()

    async def receive() -> Message:
        return given.pop() if given else await asyncio.get_running_loop().create_future()

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        body.extend(message.get("body", b""))

    await app(own, receive, send)
    return status, bytes(body)
