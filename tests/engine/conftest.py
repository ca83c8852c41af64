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


@pytest.fixture(params=[False, True], ids=["one by one", "ahead"])
def _ahead(request, monkeypatch):
    """Steps that follow each other, and steps that are launched before the one before them is settled."""
    monkeypatch.setitem(kit.defaults, "async_scheduling", request.param)
