"""How failures and events look in the protocols that are spoken here, by the path."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from kvq.server.problems import Problem

MESSAGES_PATH = "/v1/messages"
_ANTHROPICS_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """One protocol's ways."""

    error: Callable[[Problem], dict[str, Any]]  # the error object
    event: Callable[[dict[str, Any]], bytes]  # a chunk or an error object as a server-sent event
    done: bytes  # what ends a complete stream


def is_messages_path(path: str) -> bool:
    """True if whoever asks there speaks Anthropic's protocol."""
    return path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")


def dialect_of(path: str) -> Dialect:
    """What whoever asks at `path` expects."""
    return ANTHROPIC if is_messages_path(path) else OPENAI


def _anthropics_error(problem: Problem) -> dict[str, Any]:
    other = "invalid_request_error" if problem.status < 500 else "api_error"
    error: dict[str, Any] = {"type": _ANTHROPICS_TYPES.get(problem.status, other), "message": problem.message}
    if problem.code is not None:
        error["details"] = {"error_code": problem.code}
    return {"type": "error", "error": error}


def _data(body: dict[str, Any]) -> bytes:
    return b"data: " + _encoder.encode(body) + b"\n\n"


def _named(body: dict[str, Any]) -> bytes:
    return f"event: {body['type']}\n".encode() + _data(body)


OPENAI = Dialect(error=Problem.body, event=_data, done=b"data: [DONE]\n\n")
ANTHROPIC = Dialect(error=_anthropics_error, event=_named, done=b"")
