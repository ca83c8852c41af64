"""Anthropic's error objects."""

from typing import Any

from kvq.server.problems import Problem

PATH = "/v1/messages"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def is_messages_path(path: str) -> bool:
    """True if whoever asks there expects errors as Anthropic has them."""
    return path == PATH or path.startswith(PATH + "/")


def error_body(problem: Problem) -> dict[str, Any]:
    """A problem as Anthropic has it."""
    other = "invalid_request_error" if problem.status < 500 else "api_error"
    error: dict[str, Any] = {"type": _TYPES.get(problem.status, other), "message": problem.message}
    if problem.code is not None:
        error["details"] = {"error_code": problem.code}
    return {"type": "error", "error": error}
