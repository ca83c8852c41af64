"""What the server writes about itself."""

import logging
from collections.abc import Iterator

import pytest

from kvq.server import logs

NAMES = ("kvq", *logs._LOGGERS)


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    before = [
        (logger, logger.handlers, logger.propagate, logger.level) for logger in map(logging.getLogger, NAMES)
    ]
    yield
    logging.captureWarnings(False)
    for logger, logger.handlers, logger.propagate, level in before:
        logger.setLevel(level)


def test_that_the_grace_is_over_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    listener = logs.configure(logs.LogConfig())
    foreign = logging.getLogger("uvicorn.error")
    foreign.error("Cancel %s running task(s), timeout graceful shutdown exceeded", 3)
    foreign.error("something else")
    listener.stop()
    first, second = capsys.readouterr().err.splitlines()
    assert "level=warning" in first
    assert "Cancel 3 running task(s)" in first
    assert "level=error" in second
