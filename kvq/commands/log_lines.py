"""kvq's own log on the command line: warnings are lines on standard error, the stages of a load are heard by
whoever shows them, and the rest is not shown."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvq.commands.screen import echo

_log = logging.getLogger("kvq")


class _Lines(logging.Handler):
    """Warnings as lines, and what is information to whoever listens."""

    def __init__(self) -> None:
        super().__init__()
        self.on_stage: Callable[[str], None] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            echo(f"kvq: {record.levelname.lower()}: {record.getMessage()}", err=True)
        elif self.on_stage is not None and record.levelno == logging.INFO:
            self.on_stage(record.getMessage())


_LINES = _Lines()


def show_warnings() -> None:
    """Show what kvq warns of from now on."""
    if _LINES not in _log.handlers:
        _log.addHandler(_LINES)


@contextmanager
def hear_stages(tell: Callable[[str], None]) -> Iterator[None]:
    """Hand on what kvq's log says at the level of information meanwhile."""
    show_warnings()
    level, before = _log.level, _LINES.on_stage
    _log.setLevel(logging.INFO)
    _LINES.on_stage = tell
    try:
        yield
    finally:
        _LINES.on_stage = before
        _log.setLevel(level)
