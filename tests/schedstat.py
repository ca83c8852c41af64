"""Systems that tell a thread how long it waited for its core."""

from pathlib import Path

import pytest


def _is_counted() -> bool:
    had = Path("/proc/thread-self/schedstat")
    return had.exists() and had.read_text().split()[0] != "0"


needs_schedstat = pytest.mark.skipif(not _is_counted(), reason="no thread knows that it shares its core")
