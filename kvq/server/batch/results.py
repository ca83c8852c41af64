"""The lines of a batch's results, in OpenAI's format."""

from typing import Any
from uuid import uuid4

import msgspec

from kvq.server.batch.lines import Line
from kvq.server.problems import Problem

_ID = "batch_req_"
BEGIN = f'{{"id":"{_ID}'.encode()  # every line that we write begins so
_PASSING = (429, 500, 502, 503, 504)  # statuses that are not the request's own fault


class Response(msgspec.Struct, frozen=True):
    """What is read again of a request that was run."""

    status_code: int


class Error(msgspec.Struct, frozen=True):
    """What is read again of a line that was no request."""

    code: str
    line: int


class Result(msgspec.Struct, frozen=True):
    """What is read again of a line."""

    id: str
    custom_id: str | None
    response: Response | None
    error: Error | None

    @property
    def is_failed(self) -> bool:
        """True unless it holds an answer."""
        return self.response is None or self.response.status_code != 200

    @property
    def is_passing(self) -> bool:
        """True if it failed by the engine or for too much load, so that it may succeed another time."""
        return self.response is not None and self.response.status_code in _PASSING


_decoder = msgspec.json.Decoder(Result)


def parse_result(raw: bytes) -> Result | None:
    """A line that we wrote; None if it is something else."""
    try:
        result = _decoder.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return result if result.id.startswith(_ID) and (result.response or result.error) else None


def encode_answer(line: Line, body: dict[str, Any]) -> bytes:
    """Of a request that was answered."""
    return _encode(line.custom_id, _response(200, body), None)


def encode_problem(line: Line, problem: Problem) -> bytes:
    """Of a request that was refused, or failed."""
    return _encode(line.custom_id, _response(problem.status, problem.body()), None)


def encode_fault(line: Line) -> bytes:
    """Of a line that is no request."""
    assert line.fault is not None, "only a faulty line has a fault"
    error = {"code": line.fault.code, "message": line.fault.message, "line": line.number}
    return _encode(line.custom_id, None, error)


def _response(status: int, body: dict[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": f"req_{uuid4().hex}", "body": body}


def _encode(custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    line = {"id": _ID + uuid4().hex, "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line)
