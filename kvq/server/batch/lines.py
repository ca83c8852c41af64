"""Batch lines: requests and results in OpenAI's batch format, one line at a time."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from kvq.server.http.json_bounds import scan

MAX_LINE = 8 << 20  # bytes, the limit of the server for one request
MAX_CUSTOM_ID = 512  # characters
FIELDS = ("custom_id", "method", "url", "body")
_BOM = b"\xef\xbb\xbf"
ID = "batch_req_"
BEGIN = f'{{"id":"{ID}'.encode()  # beginning of every result line


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Request in one line, or, in `fault`, the reason why the line contains no valid request."""

    number: int  # from 1
    custom_id: str | None = None  # None if it could not be read
    url: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    fault: str | None = None
    fault_code: str = "invalid_line"
    unknown: str | None = None  # first unknown field of the line


def read_lines(path: Path) -> Iterator[Line]:
    """Yield all nonempty lines. Only one line is in memory at a time.

    Raises:
        OSError: the file can't be read.
    """
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE + 1):
            number += 1
            if number == 1:
                raw = raw.removeprefix(_BOM)
            if len(raw) > MAX_LINE:
                while raw and not raw.endswith(b"\n"):
                    raw = file.readline(MAX_LINE)
                yield _faulty(number, None, f"a line may have {MAX_LINE} bytes")
            elif raw.strip():
                yield parse_line(number, raw)


def parse_line(number: int, raw: bytes) -> Line:  # D336: lines have the limits of bodies
    """Return the request in a line; if the line contains no valid request, `fault` is the reason."""
    try:
        for _ in scan(raw, inside=1):  # without pauses, since no client is waiting for tokens
            pass
        given = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return _faulty(number, None, f"not JSON: {error}")
    except ValueError as error:
        return _faulty(number, None, f"it can't be read: {error}")
    if not isinstance(given, dict):
        return _faulty(number, None, "not a JSON object")
    custom_id = given.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        return _faulty(number, None, f"custom_id must be a text of 1 to {MAX_CUSTOM_ID} characters")
    if given.get("method", "POST") != "POST":
        return _faulty(number, custom_id, "method must be POST")
    url, body = given.get("url"), given.get("body")
    if not isinstance(url, str):
        return _faulty(number, custom_id, "url must be a text such as /v1/chat/completions")
    if not isinstance(body, dict):
        return _faulty(number, custom_id, "body must be a JSON object")
    unknown = next((name for name in given if name not in FIELDS and given[name] is not None), None)
    return Line(number=number, custom_id=custom_id, url=url, body=body, unknown=unknown)


def _faulty(number: int, custom_id: str | None, message: str) -> Line:
    return Line(number=number, custom_id=custom_id, fault=f"line {number}: {message}")


def encode_answer(line: Line, body: dict[str, Any], status: int = 200) -> bytes:
    """Encode the result of a request; `body`: a response, or an error object if the request failed."""
    response = {"status_code": status, "request_id": f"req_{uuid4().hex}", "body": body}
    return _encode(line.custom_id, response, None)


def encode_fault(line: Line) -> bytes:
    """Return the encoded result of a line that contains no valid request."""
    assert line.fault is not None, "only a faulty line has a fault"
    error = {"code": line.fault_code, "message": line.fault, "line": line.number}
    return _encode(line.custom_id, None, error)


def _encode(custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    line = {"id": ID + uuid4().hex, "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line)
