"""Problems: error answers, in the words of OpenAI's and Anthropic's protocols."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec


class Problem(Exception):
    """An answer with an HTTP status other than 200."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.is_counted = False  # among the requests that ended

    @property
    def ending(self) -> str:
        """Ending of a request with this answer, as metrics name it."""
        other = "invalid" if self.status < 500 else "error" if self.status == 500 else "refused"
        return {429: "limited", 504: "timeout"}.get(self.status, other)

    def counted(self) -> "Problem":
        """Mark the request as counted, and return this problem."""
        self.is_counted = True
        return self

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        """`Retry-After`, if trying again may help."""
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


def unavailable(message: str, *, retry_after_s: int = 1) -> Problem:
    """Return the problem of a server that can't take a request now."""
    return Problem(503, message, type="service_unavailable", code="unavailable", retry_after_s=retry_after_s)


def timed_out(message: str) -> Problem:
    """Return the problem of a request that took longer than this server allows."""
    return Problem(504, message, type="timeout_error", code="timeout")


def failed(message: str) -> Problem:
    """Return the problem of a request that failed through no fault of its own."""
    return Problem(500, message, type="server_error", code="engine_error")


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
    """A protocol's form of errors and streams."""

    error: Callable[[Problem], dict[str, Any]]  # the error object
    event: Callable[[dict[str, Any]], bytes]  # a chunk or an error object as a server-sent event
    done: bytes  # the end of a complete stream


def is_messages_path(path: str) -> bool:
    """True if requests at this path are in Anthropic's protocol."""
    return path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")


def dialect_of(path: str) -> Dialect:
    """Return the dialect of a path."""
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
