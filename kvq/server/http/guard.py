"""Guard that checks the host, origin, key, size and time of every request before reading its body."""

import base64
import binascii
import logging
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from kvq.server.http.credentials import WATCHER, Access, Credentials
from kvq.server.http.ignored import HEADER, IGNORED
from kvq.server.http.incoming import FREE, MAX_BODY, Incoming, skip, too_large
from kvq.server.http.problems import Problem, error_object
from kvq.server.logs import log_event, request_id

MAX_HEADERS = 64 << 10  # bytes of all names and values together
OPEN = ("/health/live",)  # accessible without a key
_WATCHED = ("/metrics", "/health", "/version")  # and paths below; a metrics key may read only these
DOCS, DOCUMENT = "/docs", "/openapi.json"
POLLED = "/pool"  # polled by every open page, four times a second
CHALLENGE = 'Basic realm="kvq: any name, an API key as the password", charset="UTF-8"'
# Polled every few seconds by machines, which would fill the log. A missing engine is logged once, elsewhere;
# an engine that does not generate is logged only here.
_QUIET = {
    **dict.fromkeys(("/health", "/health/live", "/health/ready", "/metrics", POLLED), (200, 503)),
    "/health/deep": (200,),
}
ADMITTED = "kvq_admitted"  # scope key of an admitted request, for which its tenant was charged
VERSION, VERSION_HEADER = "kvq_version", "x-kvq-version"  # scope key of the version that answers; its header
REASON = "kvq_reason"  # scope key of the code or type of the problem that answers a request
# Refusals of invalid requests: finding the error costs as much as reading a valid request
_COSTLY = frozenset((400, 403, 404, 405, 408, 411, 413, 415, 422, 431))
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
LOOPBACK = ("127.0.0.1", "[::1]", "localhost")


_BURST, _PER_S = 500, 5.0  # log lines that any client can cause: burst, and rate per second


class _LogLimit:
    """Rate limit on log lines that any client can cause: a burst, then a few per second."""

    def __init__(self) -> None:
        self._left = float(_BURST)
        self._filled_s = perf_counter()
        self._num_left_out = 0

    def take(self) -> int | None:
        """Return the number of lines dropped before this line, or None if this line must be dropped."""
        now = perf_counter()
        self._left = min(_BURST, self._left + (now - self._filled_s) * _PER_S)
        self._filled_s = now
        if self._left < 1:
            self._num_left_out += 1
            return None
        self._left -= 1
        num, self._num_left_out = self._num_left_out, 0
        return num


@dataclass(eq=False)
class Guard:
    """ASGI middleware that checks, counts and logs requests, and assigns each an id."""

    app: ASGIApp
    _: KW_ONLY
    access: Access
    credentials: Credentials | None = None  # the valid keys; default: keys in `access`
    # check(path, tenant) raises Problem if a request can't be served, whatever its body is
    check: Callable[[str, str], object] = lambda path, tenant: None
    charge: Callable[[str], object] = lambda tenant: None  # called for each invalid request
    # count(path, problem) is called for each POST that the guard refuses
    count: Callable[[str, Problem], object] = lambda path, problem: None

    def __post_init__(self) -> None:
        self._credentials = self.credentials or Credentials(self.access)
        self._incoming = Incoming()
        self._refused = _LogLimit()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, answer, body = perf_counter(), _Answer(scope, send), self._incoming.body()
        token = request_id.set(answer.request_id)
        try:
            try:
                self._check(scope)
                whole = await body.read(receive, scope["kvq_tenant"], _most_bytes(scope))
            except Problem as problem:
                scope[REASON] = problem.code or problem.type
                if scope["method"] == "POST":
                    self.count(scope["path"], problem)
                body.release()
                await skip(receive)
                response = as_response(problem, scope["path"])
                response.headers["Connection"] = "close"
                if problem.status == 401 and is_browsed(scope["path"]):
                    response.headers["WWW-Authenticate"] = CHALLENGE
                await response(scope, receive, answer.send)
                return
            if whole is not None:
                # HEAD is handled as GET; the connection omits the body
                as_get = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
                await self.app(as_get, whole, answer.send)
        finally:
            body.release()
            if answer.status in _COSTLY and ADMITTED not in scope and "kvq_tenant" in scope:
                self.charge(scope["kvq_tenant"])
            self._log(scope, answer.status, perf_counter() - began)
            request_id.reset(token)

    def _log(self, scope: Scope, status: int | None, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", None)
        is_quiet = route is not None and status in _QUIET.get(route, ())
        left_out = 0 if is_quiet or status is None or status < 400 else self._refused.take()
        log_event(
            "request",
            level=logging.DEBUG if is_quiet or left_out is None else logging.INFO,
            method=scope["method"] if route or scope["method"] in _METHODS else None,
            route=route or "unknown",
            status=status,
            reason=scope.get(REASON),
            version=scope.get(VERSION),
            seconds=seconds,
            tenant=scope.get("kvq_tenant") or None,
            refusals_left_out=left_out or None,
        )

    def _check(self, scope: Scope) -> None:
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADERS:
            raise Problem(431, f"the headers of a request may have {MAX_HEADERS} bytes together")
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        if self.access.hosts is not None and _name(host) not in self.access.hosts:
            raise Problem(
                400, "this server has no such host name; see --allowed-host", code="host_not_allowed"
            )
        origin = headers.get(b"origin", b"").decode("latin-1")
        origins = self.access.origins
        if origin and "*" not in origins and origin not in origins and _netloc(origin) != host:
            raise Problem(403, "pages of other origins may not call this server; see --allow-origin")
        scope["kvq_tenant"] = self._tenant(scope["path"], headers)
        if b"transfer-encoding" in headers and b"content-length" in headers:
            raise Problem(400, "Content-Length and Transfer-Encoding exclude each other")
        length = headers.get(b"content-length", b"0")
        if len(length) > 16 or int(length) > _most_bytes(scope):  # h11 has verified the digits
            raise too_large(_most_bytes(scope))
        self.check(scope["path"], scope["kvq_tenant"])

    def _tenant(self, path: str, headers: dict[bytes, bytes]) -> str:
        if path in OPEN:
            return ""
        authorization = headers.get(b"authorization", b"")
        scheme, _, token = authorization.partition(b" ")
        given = token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        if is_browsed(path):
            given = basic_password(authorization) or given
        tenant = self._credentials.tenant(given)
        if tenant == WATCHER and not path.startswith(_WATCHED):
            raise Problem(403, f"this key is for {', '.join(_WATCHED)} alone", code="metrics_key")
        if tenant is None:
            raise Problem(
                401,
                "this server needs an API key: Authorization: Bearer KEY, or x-api-key: KEY",
                code="invalid_api_key",
            )
        return tenant


def is_browsed(path: str) -> bool:
    """Return True if browsers open this path directly and may send a key as a Basic password."""
    return path in ("/", POLLED, DOCS, DOCUMENT) or path.startswith("/page/")


def basic_password(authorization: bytes) -> bytes:  # D332: Basic authentication opens the page only
    """Return the password in a `Basic` authorization header, or b"" if the header has another scheme."""
    scheme, _, credentials = authorization.partition(b" ")
    if scheme.lower() != b"basic":
        return b""
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


class _Answer:
    """Sender of a response: records its status, and adds the request's id and the names of ignored fields."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.status: int | None = None
        self.request_id = f"req-{uuid4().hex}"
        self._scope = scope
        self._send = send

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            own = [(b"x-request-id", self.request_id.encode())]
            if (ignored := self._scope.get(IGNORED)) is not None:
                own.append((HEADER.encode(), ignored.encode()))
            if (version := self._scope.get(VERSION)) is not None:
                own.append((VERSION_HEADER.encode(), version.encode()))
            message["headers"] = [*message.get("headers", ()), *own]
        await self._send(message)


def _most_bytes(scope: Scope) -> int:
    """Return the size limit of a request's body, which is `FREE` if the route does not read the body."""
    is_read = scope["method"] in ("POST", "PUT", "PATCH") and scope["path"] not in OPEN
    return MAX_BODY if is_read else FREE


def as_response(problem: Problem, path: str) -> JSONResponse:
    """Return a problem as a response in the protocol of the path."""
    return JSONResponse(error_object(problem, path), problem.status, problem.headers())


def _name(host: str) -> str:
    """Return the host name in a Host header, without the port."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None
