"""What every request passes before anything reads it: host, origin, key, size, time."""

import asyncio
import contextlib
import secrets
from dataclasses import dataclass
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvq.server.browsed import CHALLENGE, POLLED, basic_password, is_browsed
from kvq.server.dialects import dialect_of
from kvq.server.logs import log_event, request_id
from kvq.server.problems import Problem

MAX_BODY = 8 << 20  # bytes
BODY_S = 30.0  # for a body to arrive
_SKIP_S = 1.0
OPEN = ("/health/live",)  # need no key
LOOPBACK = ("127.0.0.1", "[::1]", "localhost")


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """Who may ask, and from where."""

    api_keys: frozenset[str] = frozenset()
    hosts: frozenset[str] | None = None  # names this server is called by, without ports; None: any
    origins: frozenset[str] = frozenset()  # pages of other origins that may call it, such as https://a.org


class Guard:
    """Refuses, counts, names and logs requests."""

    def __init__(self, app: ASGIApp, *, access: Access) -> None:
        self._app = app
        self._access = access
        self._keys = [key.encode() for key in sorted(access.api_keys)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, answer = perf_counter(), _Answer(send)
        token = request_id.set(answer.request_id)
        try:
            try:
                self._check(scope)
                whole = await _read(receive)
            except Problem as problem:
                await _skip(receive)
                response = as_response(problem, scope["path"])
                response.headers["Connection"] = "close"
                if problem.status == 401 and is_browsed(scope["path"]):
                    response.headers["WWW-Authenticate"] = CHALLENGE
                await response(scope, receive, answer.send)
                return
            if whole is not None:
                await self._app(scope, whole, answer.send)
        finally:
            route = getattr(scope.get("route"), "path", None)
            if route != POLLED or answer.status != 200:  # else an open page alone would fill the log
                log_event(
                    "request",
                    method=scope["method"] if route else None,
                    route=route or "unknown",
                    status=answer.status,
                    seconds=perf_counter() - began,
                    tenant=scope.get("kvq_tenant") or None,
                )
            request_id.reset(token)

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        if self._access.hosts is not None and _name(host) not in self._access.hosts:
            raise Problem(
                400,
                "this server has no such host name; see --allowed-host",
                code="host_not_allowed",
            )
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and origin not in self._access.origins and _netloc(origin) != host:
            raise Problem(403, "pages of other origins may not call this server; see --allow-origin")
        scope["kvq_tenant"] = self._tenant(scope["path"], headers)
        length = headers.get(b"content-length", b"0")
        if len(length) > 16 or int(length) > MAX_BODY:  # the connection has checked that it is a number
            raise _too_large()

    def _tenant(self, path: str, headers: dict[bytes, bytes]) -> str:
        """Who asks, by the number of the key."""
        if not self._keys or path in OPEN:
            return ""
        authorization = headers.get(b"authorization", b"")
        scheme, _, token = authorization.partition(b" ")
        given = token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        if is_browsed(path):
            given = basic_password(authorization) or given
        found = [i for i, key in enumerate(self._keys) if secrets.compare_digest(given, key)]
        if not found:
            raise Problem(
                401,
                "this server needs an API key: Authorization: Bearer KEY, or x-api-key: KEY",
                code="invalid_api_key",
            )
        return f"key-{found[0]}"


class _Answer:
    """Sees the status of an answer, and adds the request's id to it."""

    def __init__(self, send: Send) -> None:
        self.status: int | None = None
        self.request_id = f"req-{uuid4().hex}"
        self._send = send

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode())]
        await self._send(message)


async def _skip(receive: Receive) -> None:
    """Pass over what is left of a refused body for a moment: closed at once, a client that is still
    sending would see a reset and never the answer.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_SKIP_S):
            while (await receive()).get("more_body", False):
                pass


async def _read(receive: Receive) -> Receive | None:
    """Read a body within its bounds; returns what reads it again, and then the connection's end;
    None if that came first.

    Raises:
        Problem: it is too large, or takes too long.
    """
    body, more = bytearray(), True
    try:
        async with asyncio.timeout(BODY_S):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > MAX_BODY:
                    raise _too_large()
    except TimeoutError as error:
        raise Problem(408, f"the body did not arrive within {BODY_S:g} s") from error
    whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

    async def again() -> Message:
        return whole.pop() if whole else await receive()

    return again


def as_response(problem: Problem, path: str) -> JSONResponse:
    """A problem as an answer, as those who ask at `path` expect it."""
    return JSONResponse(dialect_of(path).error(problem), problem.status, problem.headers())


def _name(host: str) -> str:
    """A Host header without its port."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _too_large() -> Problem:
    return Problem(413, f"a request may have {MAX_BODY} bytes", code="request_too_large")
