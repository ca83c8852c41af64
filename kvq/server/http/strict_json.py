"""Strict JSON for requests: no text in place of a number, bounded depth, valid Unicode."""

import secrets
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator
from typing import Annotated, Any

import msgspec
from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from kvq.errors import EngineError
from kvq.server.http.json_bounds import scan
from kvq.server.http.loop_budget import Again, LoopBudget
from kvq.strict_json import check_value

DECODED = "kvq_decoded"  # scope key of a request's decoded body, until a route removes it
MAX_TEXT = 4 << 20  # characters
_LARGE = 64 << 10  # bodies of at least this many bytes are decoded in a separate turn
Span = tuple[int, int]  # start and end of a text, within its quotes
_PART = 512 << 10  # bytes
_ESCAPE = 6  # bytes of the longest escape: \u20ac


def decode(body: bytes | bytearray, spans: Iterable[Span]) -> Generator[Again, None, Any]:  # D310
    """Return the decoded value of a body; `spans`: positions of the long strings in the body, in order.

    Long strings are decoded in parts, because decoding 8 MiB at once would block the loop for 15 ms.

    Raises:
        msgspec.MsgspecError: the body is not JSON.
    """
    mark, texts, rest, at = secrets.token_hex(), dict[str, str](), bytearray(), 0
    for start, end in spans:
        place = f"{mark}{len(texts)}"
        texts[place] = yield from _decode_text(body, start, end)
        rest += body[at:start] + place.encode()
        at = end
    if not texts:
        return msgspec.json.decode(body)
    return _put_back(_decode_part(rest + body[at:]), texts)


def _decode_text(body: bytes | bytearray, start: int, end: int) -> Generator[Again, None, str]:  # D314
    parts = []
    while start < end:
        upto = end if end - start <= _PART else _cut(body, start, start + _PART)
        parts.append(_decode_part(b'"' + body[start:upto] + b'"'))
        start = upto
        yield Again.NEXT
    return "".join(parts)


def _decode_part(part: bytes | bytearray) -> Any:
    try:
        return msgspec.json.decode(part)
    except msgspec.MsgspecError as error:  # the message gives the byte position within the part
        raise msgspec.DecodeError(str(error).partition(" (byte")[0]) from None


def _cut(body: bytes | bytearray, start: int, at: int) -> int:
    """Return a position at or shortly before `at` that splits no character, escape or surrogate pair."""
    for _ in range(3):
        at -= body[at] & 0xC0 == 0x80
    last = body.rfind(b"\\", at - _ESCAPE, at)
    if last >= 0:
        before = body[start : last + 1]
        if (len(before) - len(before.rstrip(b"\\"))) % 2:  # the last backslash begins an escape
            at = last
    is_second_half = body[at : at + 3].lower() == b"\\ud" and body[at + 3 : at + 4].lower() in b"cdef"
    return at - _ESCAPE if is_second_half else at


def _put_back(value: Any, texts: dict[str, str]) -> Any:
    """Replace placeholders with their texts, modifying objects and lists in place."""
    if isinstance(value, str):
        return texts.get(value, value)
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if isinstance(item, str | dict | list):
            value[key] = _put_back(item, texts)
    return value


def _whole(value: Any) -> Any:
    """Convert floats such as 1.0 to integers, as in JSON schema; some clients send only such numbers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _few(text: str) -> str:
    if len(text) > MAX_TEXT:
        words = "String should have at most {max_length} characters"
        raise PydanticCustomError("string_too_long", words, {"max_length": MAX_TEXT})
    return text


# D317: pydantic's own length bound would encode 8 MiB several times to count characters
LongText = Annotated[str, AfterValidator(_few), Field(strict=True, json_schema_extra={"maxLength": MAX_TEXT})]
# Must be the last of an integer's annotations: bounds after it would be missing from the OpenAPI document
WHOLE = BeforeValidator(_whole)
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
JsonObject = Annotated[dict[str, Any], AfterValidator(check_value)]


async def read_json(body: bytes | bytearray, budget: LoopBudget, tenant: str) -> Any:
    """Return a decoded body, in slices of the loop's time.

    Raises:
        HTTPException: the body is not strict JSON or exceeds a limit (400), or the server is ending (503).
    """
    decoded: list[Any] = []

    def read() -> Iterator[Again]:
        long: list[Span] = []
        yield from scan(body, long=long)
        if len(body) > _LARGE:
            yield Again.IN_TURN
        decoded.append((yield from decode(body, long)))
        if len(body) > _LARGE:  # validation then gets a separate turn
            yield Again.NEXT

    try:
        await budget.through(tenant, read())
    except EngineError as error:
        raise HTTPException(503, str(error), {"Retry-After": "1"}) from error
    except RecursionError as error:
        raise HTTPException(400, "the body is nested too deep") from error
    except msgspec.MsgspecError as error:
        raise HTTPException(400, f"the body is no JSON: {error}") from error
    except ValueError as error:
        raise HTTPException(400, f"the body can't be read: {error}") from error
    return decoded[0]


def check_type(headers: Headers) -> None:
    """Raise HTTPException (415) unless the body of a POST is JSON and not compressed."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise HTTPException(415, "send the body as JSON, with Content-Type: application/json")
    if headers.get("content-encoding", "identity") != "identity":
        raise HTTPException(415, "send the body as it is, without Content-Encoding")


class _JsonRequest(Request):
    """Request whose body must be valid UTF-8 and strict JSON: no NaN, no lone surrogates."""

    async def body(self) -> bytes:
        """Return the body without the copy that Starlette would make."""
        if not hasattr(self, "_body"):
            pieces = [piece async for piece in self.stream() if piece]
            self._body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return self._body

    async def json(self) -> Any:
        """Return the decoded body; raise HTTPException if the body is not strict JSON or is too large."""
        if DECODED not in self.scope:  # a dispatcher may have decoded it
            budget, tenant = self.app.state.loop_budget, self.scope.get("kvq_tenant", "")
            self.scope[DECODED] = await read_json(await self.body(), budget, tenant)
        return self.scope[DECODED]


class JsonRoute(APIRoute):
    """Route that accepts only strict JSON bodies."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        """Return FastAPI's handler, wrapped to receive a `_JsonRequest`."""
        handle = super().get_route_handler()

        async def read(request: Request) -> Response:
            if request.method == "POST":
                check_type(request.headers)
            return await handle(_JsonRequest(request.scope, request.receive))

        return read
