"""Logs of agents' sessions: files of JSON lines, read whatever they hold."""

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from kvq import strict_json
from kvq.errors import ConfigError
from kvq.printable import one_line
from kvq.traces.records import read_record
from kvq.traces.sessions import Log, RecordedSession

_MAX_LINE = 64 << 20  # bytes
_BLANK = b"\xef\xbb\xbf \t\r\n"  # white space, and the bytes of a byte order mark
_SHOWN = 3  # refused lines in an error
_Record = tuple[int, Any]  # a line's number, and its bytes or its decoded value
_Ends = dict[bytes, tuple[int, RecordedSession]]  # by a digest of all messages; no later one continues them


def read_log(path: Path) -> Log:
    """Read a file of JSON lines, or of one JSON array, of requests with their answers.

    Lines may be OpenAI chat, OpenAI Responses, Anthropic messages or recordings of `kvq serve`, also mixed.
    Agents send the whole conversation each turn: a record that a later one of its session continues is left
    out. Raise ConfigError if the file can't be read, or holds no session.
    """
    log, ends = Log(), _Ends()
    try:
        with path.open("rb") as file:
            for line, found in _records(file):
                try:
                    record = _decode(found) if isinstance(found, bytes) else found
                    _add(ends, line, read_record(record))
                except ConfigError as error:
                    log.refused.append((line, str(error)))
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}") from error
    _name(ends, log)
    log.refused.sort()
    if not log.sessions:
        first = "; ".join(f"line {line}: {reason}" for line, reason in log.refused[:_SHOWN])
        found = f"{len(log.refused)} lines can't be used: {first}" if first else "it is empty"
        raise ConfigError(f"{path} holds no session: {found}")
    return log


def _add(ends: _Ends, line: int, session: RecordedSession) -> None:
    """Add a record's conversation, and drop those that it continues."""
    digest = blake2b(json.dumps(session.name).encode(), digest_size=16)
    for message in session.messages:
        digest.update(json.dumps(message).encode())
        ends.pop(digest.digest(), None)
    ends[digest.digest()] = (line, session)


def _name(ends: _Ends, log: Log) -> None:
    """Add the conversations to a log, with unique names; refuse those without an answer."""
    seen: dict[str, int] = {}
    for line, session in ends.values():
        if next(session.answers(), None) is None:
            reason = "no message of the assistant answers another; a session needs one, or a response"
            log.refused.append((line, reason))
            continue
        first = name = one_line(session.name) or f"line {line}"
        while name in seen:
            seen[first] += 1
            name = f"{first} ({seen[first]})"
        seen[name] = 1
        log.sessions.append(replace(session, name=name))


def _records(file: io.BufferedReader) -> Iterator[_Record]:
    """Yield the lines that are not empty, or the items of the array that the file is."""
    if file.peek(64).lstrip(_BLANK)[:1] != b"[":
        yield from _lines(file)
        return
    raw = file.read(strict_json.MAX_FILE + 1)
    try:
        items = strict_json.loads(raw) if len(raw) <= strict_json.MAX_FILE else None
    except ValueError:
        items = None
    if isinstance(items, list):
        yield from enumerate(items, 1)
    else:  # lines, of which the first is an array
        yield from _lines(io.BytesIO(raw + file.read()))


def _lines(file: io.BufferedIOBase) -> Iterator[_Record]:
    line = 0
    while raw := file.readline(_MAX_LINE + 1):
        line += 1
        rest = raw
        while len(rest) > _MAX_LINE and not rest.endswith(b"\n"):
            rest = file.readline(_MAX_LINE + 1)
        if raw.strip(_BLANK):
            yield line, raw


def _decode(raw: bytes) -> Any:
    """Decode a line; errors hold nothing of its texts."""
    if len(raw.rstrip(b"\r\n")) > _MAX_LINE:
        raise ConfigError(f"a line may have {_MAX_LINE >> 20} MiB, it has more")
    try:
        return strict_json.loads(raw)
    except UnicodeDecodeError:
        reason = "has to be UTF-8; it has other bytes"
    except JSONDecodeError as error:
        reason = f"has to be JSON: {error.msg.removesuffix(' at')} at character {error.colno}"
    except ValueError as error:  # a path of names, and what is wrong there
        reason = f"can't be read: {str(error).rpartition(': ')[2]}"
        if "twice in one object" in reason:
            reason = "can't be read: a name is twice in one object"
        elif "digit" in reason:
            reason = "can't be read: integers may have 64 bits"
    raise ConfigError(f"a line {reason}")
