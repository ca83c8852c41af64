"""Recording of chats: one JSON line for each finished request, redacted and written by its own thread."""

import hashlib
import json
import logging
import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from kvq.errors import ConfigError, explained
from kvq.fileio import PRIVATE
from kvq.server.logs import log_event
from kvq.server.redaction import Redactor

RECORDING = "kvq_recording"  # key of the version in a line
VERSION = 1
_MAX_WAITING = 64  # answers; those beyond are not recorded
_Request = Callable[[], dict[str, Any]]  # returns the body


class Recorder:
    """Recording to a file that only its owner can read; it stops at its size, or if it can't be written."""

    def __init__(self, path: Path, redactor: Redactor | None, max_bytes: int = 1 << 30) -> None:
        """Open the file, or raise ConfigError; without a redactor, texts stay as they are."""
        self._path, self._redactor, self._max_bytes = path, redactor, max_bytes
        with explained(ConfigError, f"can't write {path}"):
            self._file = open(path, "ab", opener=partial(os.open, mode=PRIVATE))  # noqa: SIM115
            if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                raise ConfigError(f"--record needs a file, and {path} is none")
            os.chmod(self._file.fileno(), PRIVATE)
        self._file.write(b"\n" * (self._file.tell() > 0))  # the last line may be cut, by a full disk
        self._has_ended = False
        self._room = threading.BoundedSemaphore(_MAX_WAITING)
        self._thread = ThreadPoolExecutor(1, "kvq-record")

    def put(self, request: _Request, response: dict[str, Any]) -> None:
        """Record a request with its response, which no one changes any more; return at once."""
        if self._has_ended:
            return
        if self._room.acquire(blocking=False):
            with suppress(RuntimeError):  # closed
                self._thread.submit(self._write, request, response)
        else:
            log_event("record_skipped", level=logging.WARNING, waiting=_MAX_WAITING)

    def close(self) -> None:
        """Write everything that waits, and close the file."""
        self._thread.shutdown()
        with suppress(OSError):  # the disk is full, which has been logged
            self._file.close()

    def _write(self, request: _Request, response: dict[str, Any]) -> None:
        try:
            if self._has_ended:
                return
            line = self._line(request(), response)
            if self._file.tell() + len(line) > self._max_bytes:
                self._end("record_full", f"{self._max_bytes} bytes")
            else:
                self._file.write(line)
                self._file.flush()
        except Exception as error:  # noqa: BLE001 - nobody waits for this thread
            self._end("record_failed", type(error).__name__)
        finally:
            self._room.release()

    def _line(self, given: dict[str, Any], response: dict[str, Any]) -> bytes:
        session = given.pop("session_id", None) or ""
        if self._redactor is not None:
            given, response = self._redactor.value(given), self._redactor.value(response)
            # Another name of the same session
            session = session and hashlib.blake2b(session.encode(), digest_size=8).hexdigest()
        record = {RECORDING: VERSION, "session": session, "request": given, "response": response}
        return json.dumps(record, ensure_ascii=False).encode() + b"\n"

    def _end(self, event: str, reason: str) -> None:
        self._has_ended = True
        log_event(event, level=logging.WARNING, path=str(self._path), reason=reason)
