"""Problems: error responses in OpenAI's, Anthropic's and Ollama's protocols."""

from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import msgspec


@dataclass(eq=False)
class Problem(Exception):
    """Error response: an HTTP status other than 200, and a message."""

    status: int
    message: str
    _: KW_ONLY
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None
    is_counted: bool = field(default=False, init=False)  # the metrics already include the request

    def __str__(self) -> str:
        return self.message

    @property
    def ending(self) -> str:
        """Outcome label in the metrics for a request that gets this response."""
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
        """Return the `Retry-After` header if a retry may succeed, else no headers."""
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


class Overload(Problem):
    """Problem of a request that would be served if there were less to do."""


def unavailable(message: str, *, retry_after_s: int = 1) -> Problem:
    return Problem(503, message, type="service_unavailable", code="unavailable", retry_after_s=retry_after_s)


def timed_out(message: str) -> Problem:
    return Problem(504, message, type="timeout_error", code="timeout")


def failed(message: str) -> Problem:
    """Return the problem for a request that the engine failed to process."""
    return Problem(500, message, type="server_error", code="engine_error")


OVERFLOWN = "x-kvq-overflow"  # header of requests sent on, to be answered or refused there, and of responses
MESSAGES_PATH = "/v1/messages"
RESPONSES_PATH = "/v1/responses"
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


def is_messages_path(path: str) -> bool:
    """Return True if this path uses Anthropic's protocol rather than OpenAI's."""
    return path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")


def is_ollama_path(path: str) -> bool:
    """Return True if this path uses Ollama's protocol, whose streams are lines of JSON."""
    return path.startswith("/api/")


def error_object(problem: Problem, path: str) -> dict[str, Any]:
    """Return a problem as an error object in the path's protocol."""
    if is_ollama_path(path):
        return {"error": problem.message}
    if not is_messages_path(path):
        return problem.body()
    other = "invalid_request_error" if problem.status < 500 else "api_error"
    error: dict[str, Any] = {"type": _ANTHROPICS_TYPES.get(problem.status, other), "message": problem.message}
    if problem.code is not None:
        error["details"] = {"error_code": problem.code}
    return {"type": "error", "error": error}


def event_of(body: dict[str, Any], path: str) -> bytes:
    """Return a chunk or an error object as a server-sent event, or as a line in Ollama's protocol."""
    if is_ollama_path(path):
        return _encoder.encode(body) + b"\n"
    name = f"event: {body['type']}\n".encode() if "type" in body else b""
    return b"%bdata: %b\n\n" % (name, _encoder.encode(body))


def last_event(path: str) -> bytes:
    """Return the event that ends a complete stream, or b"" if the protocol has none."""
    has_none = is_messages_path(path) or is_ollama_path(path) or path == RESPONSES_PATH
    return b"" if has_none else b"data: [DONE]\n\n"
