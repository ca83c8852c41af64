"""Engines that a test made are closed behind it, and no thread of a hand-over outlives them."""

import pytest

from tests.engine import kit
from tests.handover.kit import num_threads


@pytest.fixture(autouse=True)
def _close_engines():
    kit.opened.clear()
    yield
    for llm in kit.opened:
        llm.close()
    kit.opened.clear()
    assert num_threads() == 0
