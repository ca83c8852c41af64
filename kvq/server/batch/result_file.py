"""Result file of a batch: one complete line per finished request, even if a run is interrupted."""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Self

import msgspec

from kvq.errors import ConfigError, explained
from kvq.fileio import NEW, PRIVATE, check_writable, keep_permissions
from kvq.server.batch.lines import BEGIN, ID, Line

_PASSING = (429, 500, 502, 503, 504)  # statuses of failures that the request did not cause
_FINISHED, _SEEN = 1, 2  # the line has a result; the line was in the input of this run


class _Response(msgspec.Struct, frozen=True):
    status_code: int


class _Error(msgspec.Struct, frozen=True):
    code: str
    line: int


class _Result(msgspec.Struct, frozen=True):
    """Result line: the fields that a later run reads."""

    id: str
    custom_id: str | None
    response: _Response | None
    error: _Error | None

    @property
    def is_failed(self) -> bool:
        """True if the line contains no successful response."""
        return self.response is None or self.response.status_code != 200

    @property
    def is_passing(self) -> bool:
        """True if the request failed because of the engine or the load; a retry may then succeed."""
        return self.response is not None and self.response.status_code in _PASSING


_decoder = msgspec.json.Decoder(_Result)


def _parse(raw: bytes) -> _Result | None:
    """Return the result that an earlier run wrote in a line, or None if the line is anything else."""
    try:
        result = _decoder.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return result if result.id.startswith(ID) and (result.response or result.error) else None


class ResultFile:  # D334: results are the only record
    """File to which results are appended as they arrive; tracks which lines already have a result.

    The file is locked while it is open. If a process is killed, at most one line is incomplete, and the next
    run removes that line. A digest of every custom_id is kept in memory, at about 100 bytes each.
    """

    def __init__(self, path: Path, *, retry_failed: bool = False) -> None:
        """Open or create the file. `retry_failed`: drop results of failures caused by the engine or the load.

        Raises:
            ConfigError: the file can't be written, has other content, or is in use by another run.
        """
        self.num_failed = 0
        self._path = check_writable(path)
        self._is_new = not path.exists()
        self._ids: dict[bytes, int] = {}
        self._numbers: set[int] = set()  # numbers of finished lines without custom_id
        self._file = _open_locked(self._path)
        try:
            num_passing, end = self._read(forget_passing=retry_failed)
            if num_passing:
                self._rewrite()
            else:
                self._file.truncate(end)
        except BaseException:
            self._file.close()
            raise

    @property
    def num_strangers(self) -> int:
        """Number of custom_ids that have a result but have not been seen in the input so far."""
        return sum(state == _FINISHED for state in self._ids.values())

    def unfinished(self, line: Line) -> Line | None:
        """Return the line, or None if it has a result; set `fault` if its custom_id is a duplicate."""
        if line.custom_id is not None:
            key = _digest(line.custom_id)
            state = self._ids.get(key, 0)
            self._ids[key] = state | _SEEN
            if not state & _SEEN:
                return None if state & _FINISHED else line
            message = f"line {line.number}: custom_id {line.custom_id!r} was used in a line before"
            line = replace(line, custom_id=None, fault=message, fault_code="duplicate_custom_id")
        return None if line.number in self._numbers else line

    def write(self, result: bytes) -> None:
        """Append a result.

        Raises:
            ConfigError: the file can no longer be written.
        """
        left = memoryview(result + b"\n")
        with explained(ConfigError, f"can't write {self._path}"):
            while left:
                left = left[os.write(self._file.fileno(), left) :]

    def close(self) -> None:
        """Wait until everything is on disk, and unlock the file."""
        with suppress(OSError), self._file:  # pipes and some file systems can't sync
            os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the file; remove it if this run created the file, failed and wrote no result."""
        if kind is not None and self._is_new and not os.fstat(self._file.fileno()).st_size:
            self._path.unlink(missing_ok=True)
        self.close()

    def _read(self, *, forget_passing: bool) -> tuple[int, int]:
        """Record the finished lines; return the number of dropped results and the end of complete lines."""
        num_forgotten = end = 0
        for raw, result in self._results():
            end += len(raw)
            if forget_passing and result.is_passing:
                num_forgotten += 1
                continue
            self.num_failed += result.is_failed
            if result.custom_id is not None:
                self._ids[_digest(result.custom_id)] = _FINISHED
            elif result.error is not None:
                self._numbers.add(result.error.line)
        return num_forgotten, end

    def _results(self) -> Iterator[tuple[bytes, _Result]]:
        """Yield the complete lines of the file and their results.

        Raises:
            ConfigError: a line, or the start of an incomplete last line, is not a result written by kvq.
        """
        self._file.seek(0)
        number = 0
        while begin := self._file.read(len(BEGIN)):
            number += 1
            raw = begin
            if begin == BEGIN:
                raw += self._file.readline()
            result = _parse(raw) if raw.endswith(b"\n") else None
            if result is not None:
                yield raw, result
            elif raw.endswith(b"\n") or not (raw.startswith(BEGIN) or BEGIN.startswith(raw)):
                raise ConfigError(
                    f"line {number} of {self._path} is no result of a batch; name another file for them"
                )

    def _rewrite(self) -> None:
        """Atomically replace the file with one that omits the dropped results.

        The new file is locked before it is renamed, so the file at this path is locked at all times.
        """
        other = self._path.with_name(f".{self._path.name}.kvq-retry")
        other.unlink(missing_ok=True)  # left by a run that was killed
        new = _open_locked(other, permissions=PRIVATE)
        try:
            keep_permissions(new.fileno(), os.fstat(self._file.fileno()))
            for raw, result in self._results():
                if not result.is_passing:
                    new.write(raw)
            new.flush()
            os.fsync(new.fileno())
            os.replace(other, self._path)
        except OSError as error:
            new.close()
            other.unlink(missing_ok=True)
            raise ConfigError(f"can't write {other}: {error.strerror}") from error
        self._file.close()
        self._file = new


def _open_locked(path: Path, *, permissions: int = NEW) -> BinaryIO:
    """Open a file for reading and appending, or create the file with these permissions.

    Raises:
        ConfigError: the file can't be written, or another process holds its lock.
    """
    with explained(ConfigError, f"can't write {path}"):
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, permissions), "a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_ino == os.stat(path).st_ino:  # otherwise, the file was just replaced
            return file
    except BlockingIOError:
        pass
    except OSError as error:
        file.close()
        raise ConfigError(f"can't lock {path}: {error.strerror}") from error
    file.close()
    raise ConfigError(f"another kvq run-batch writes {path}; wait for its end, or name another file")


def _digest(custom_id: str) -> bytes:
    return hashlib.blake2b(custom_id.encode(), digest_size=12).digest()
