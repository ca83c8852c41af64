"""What the server answers when it can't do what was asked; `dialects` says in which protocol's words."""

from typing import Any


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

    def body(self) -> dict[str, Any]:
        """The error object."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        """`Retry-After`, if trying again may help."""
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


def unavailable(message: str, *, retry_after_s: int = 1) -> Problem:
    """The server can't take a request now."""
    return Problem(503, message, type="service_unavailable", code="unavailable", retry_after_s=retry_after_s)


def timed_out(message: str) -> Problem:
    """A request took longer than this server allows."""
    return Problem(504, message, type="timeout_error", code="timeout")


def failed(message: str) -> Problem:
    """The engine failed a request through no fault of its own."""
    return Problem(500, message, type="server_error", code="engine_error")
