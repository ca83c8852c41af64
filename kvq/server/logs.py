"""Server log: one line per event, as text or JSON, without any text from users.

Exception messages of other libraries may quote a prompt, so only the type and place are logged.
"""

import contextlib
import json
import logging
import queue
import sys
import traceback
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from typing import Any

from kvq.errors import ConfigError, KVQError, not_one_of

_FORMATS = ("text", "json")
_LEVELS = ("debug", "info", "warning", "error")
request_id: ContextVar[str] = ContextVar("kvq_request_id", default="")
# Only errors from libraries: some of their warnings appear with every unusual connection
_LOGGERS = {"uvicorn.error": logging.ERROR, "asyncio": logging.ERROR, "py.warnings": logging.WARNING}
_MAX_WAITING = 10_000  # records; the newest are dropped while standard error is blocked


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """Format and level of the log."""

    format: str = "text"  # or json
    level: str = "info"

    def __post_init__(self) -> None:
        for name, allowed in (("format", _FORMATS), ("level", _LEVELS)):
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(not_one_of(f"log {name}", value, allowed))


def log_event(name: str, *, level: int = logging.INFO, **fields: str | float | None) -> None:
    """Log one line for an event, with all fields that are not None."""
    logger = logging.getLogger("kvq")
    if not logger.isEnabledFor(level):
        return
    known = {key: value for key, value in fields.items() if value is not None}
    if rid := request_id.get():
        known["request_id"] = rid
    logger.log(level, name, extra={"fields": known})


def configure(config: LogConfig) -> QueueListener:
    """Set up logging to standard error from a separate thread; call `stop` on the listener at the end."""
    waiting: queue.Queue[Any] = queue.Queue(_MAX_WAITING)
    handler = _Dropping(waiting)
    handler.setFormatter(_Json() if config.format == "json" else _Text())
    handler.addFilter(_soften)
    logging.captureWarnings(True)
    levels: dict[str, int | str] = {"kvq": config.level.upper(), **_LOGGERS}
    for name, level in levels.items():
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level)
    listener = QueueListener(waiting, logging.StreamHandler(sys.stderr))
    listener.start()
    return listener


def _soften(record: logging.LogRecord) -> bool:
    """Pass every record, but downgrade the message about the end of the grace period to a warning."""
    if record.name == "uvicorn.error" and "graceful shutdown exceeded" in str(record.msg):
        record.levelno, record.levelname = logging.WARNING, "WARNING"
    return True


class _Dropping(QueueHandler):
    def enqueue(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):  # a server must not wait for the reader of its log
            self.queue.put_nowait(record)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return " ".join(f"{key}={_plain(value)}" for key, value in _fields(record).items())


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_fields(record), default=str)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    fields = {"time": when, "level": record.levelname.lower(), "event": record.getMessage()}
    fields |= getattr(record, "fields", {})
    if record.exc_info and record.exc_info[1] is not None:
        fields["error"] = describe(record.exc_info[1])
        frames = reversed(traceback.extract_tb(record.exc_info[2])[-12:])
        fields["trace"] = " < ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames)
    return fields


def describe(error: BaseException) -> str:
    """Return a description for the log: the message of a KVQError, but only the type of another exception."""
    name = type(error).__name__
    return f"{name}: {error}" if isinstance(error, KVQError) else name


def _plain(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return json.dumps(text) if not text or any(c.isspace() or c in '"=' for c in text) else text
