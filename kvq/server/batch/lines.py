"""The lines of a batch, in OpenAI's format, one at a time."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvq.server.json_bounds import scan

MAX_LINE = 8 << 20  # bytes, as many as the server takes for one request
MAX_CUSTOM_ID = 512  # characters
FIELDS = ("custom_id", "method", "url", "body")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Why a line is no request."""

    code: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One request, or what is wrong with it."""

    number: int  # from 1
    custom_id: str | None = None  # None if it could not be read
    url: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    fault: Fault | None = None
    unknown: str | None = None  # the first of its fields that means nothing


def read_lines(path: Path) -> Iterator[Line]:
    """All lines but empty ones; of the file only one line is held at a time.

    Raises:
        OSError: it can't be read.
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


def parse_line(number: int, raw: bytes) -> Line:
    """The request of a line; what is wrong with one is in its `fault`."""
    try:
        for _ in scan(raw, inside=1):  # nobody waits for a token meanwhile
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
    fault = Fault(code="invalid_line", message=f"line {number}: {message}")
    return Line(number=number, custom_id=custom_id, fault=fault)
