"""JSON from clients, taken literally: no text for a number, no depth without end, no text that is none."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import AfterValidator, BeforeValidator, Field
from starlette.exceptions import HTTPException

DECODED = "kvq_decoded"  # a request's body in its scope, until somebody takes it
MAX_DEPTH = 64  # of values that may be anything; what encodes them further on recurses
MAX_CONTAINERS = 1 << 18  # lists and objects of a body: each costs far more than its two bytes
_INTEGERS = range(-(1 << 63), 1 << 64)  # what MessagePack holds


def check_value(value: Any) -> Any:
    """The value, if all of it can be passed on.

    Raises:
        ValueError: it is nested too deep, or holds an integer beyond 64 bits.
    """
    left = [(value, 1)]
    while left:
        item, depth = left.pop()
        if isinstance(item, dict | list):
            if depth > MAX_DEPTH:
                raise ValueError(f"values may be nested {MAX_DEPTH} levels deep")
            left += [(one, depth + 1) for one in (item.values() if isinstance(item, dict) else item)]
        elif isinstance(item, int) and item not in _INTEGERS:
            raise ValueError("integers may have 64 bits")
    return value


def _whole(value: Any) -> Any:
    """1.0 is an integer in JSON schema's eyes, and some clients know no others."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# Of integers, last of their annotations: bounds behind it would not be told by the document.
WHOLE = BeforeValidator(_whole)
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
JsonObject = Annotated[dict[str, Any], AfterValidator(check_value)]


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _checked(body: bytes) -> bytes:
    """The body, if it can be decoded without holding up everybody else."""
    if len(body) > MAX_CONTAINERS and body.count(b"[") + body.count(b"{") > MAX_CONTAINERS:
        raise HTTPException(400, f"a body may have {MAX_CONTAINERS} lists and objects")
    return body


class _JsonRequest(Request):
    """A request whose body is UTF-8 and JSON to the letter: no NaN, no halves of surrogate pairs."""

    async def json(self) -> Any:
        """Raises HTTPException: it is something else."""
        try:
            decoded = self.scope[DECODED] = msgspec.json.decode(_checked(await self.body()))
        except RecursionError as error:
            raise HTTPException(400, "the body is nested too deep") from error
        except (msgspec.MsgspecError, ValueError) as error:
            raise HTTPException(400, f"the body is no JSON: {error}") from error
        return decoded


class JsonRoute(APIRoute):
    """A route that reads such bodies."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        """FastAPI's, for our kind of request."""
        handle = super().get_route_handler()

        async def read(request: Request) -> Response:
            if request.method == "POST" and not _is_json(request.headers.get("content-type", "")):
                raise HTTPException(415, "send the body as JSON, with Content-Type: application/json")
            if request.headers.get("content-encoding", "identity") != "identity":
                raise HTTPException(415, "send the body as it is, without Content-Encoding")
            return await handle(_JsonRequest(request.scope, request.receive))

        return read
