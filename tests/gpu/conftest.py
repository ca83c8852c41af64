"""After some errors a device answers its process no more: that process ends, so that others go on."""

import os
import sys
from collections.abc import Generator
from typing import Any

import pytest
import torch


def pytest_runtest_setup() -> None:
    """Kernels that Triton interprets take no tensors of a GPU."""
    if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("set TRITON_INTERPRET=0, so that Triton compiles")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
    """Say what failed and end a worker of pytest-xdist, which starts another one in its place."""
    report = yield
    if report.failed and os.environ.get("PYTEST_XDIST_WORKER") and not _answers():
        print(f"{item.nodeid}: {call.excinfo.exconly()[:500]}", file=sys.__stderr__, flush=True)
        os._exit(1)
    return report


def _answers() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
