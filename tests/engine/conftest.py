"""Engines that a test made are closed behind it: each has a thread that watches its steps."""

import pytest

from tests.engine import kit


@pytest.fixture(autouse=True)
def _close_engines():
    """Those of longer-lived fixtures were made before, and stay."""
    kit.opened.clear()
    yield
    for llm in kit.opened:
        llm.close()
