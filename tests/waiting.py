"""Waiting for what must happen in the end, on a machine however busy.

There is one limit, and only what hangs reaches it. What a test measures is never how long it waited.
"""

import asyncio
from collections.abc import Callable
from time import monotonic, sleep
from typing import TypeVar

T = TypeVar("T")
HANG_S = 600.0  # for processes, connections and everything else that takes a timeout
_POLL_S = 0.01


def wait_for(condition: Callable[[], T], what: str | Callable[[], str], *, every_s: float = _POLL_S) -> T:
    """The condition's value once it is true; `what` says, or tells, what never came otherwise.

    `every_s`: how long it is left alone, since to be asked may cost it something.
    """
    began = monotonic()
    while not (found := condition()):
        _check(began, what)
        sleep(every_s)
    return found


async def wait_for_async(condition: Callable[[], T], what: str | Callable[[], str]) -> T:
    """The same while an event loop runs."""
    began = monotonic()
    while not (found := condition()):
        _check(began, what)
        await asyncio.sleep(_POLL_S / 10)
    return found


def _check(began: float, what: str | Callable[[], str]) -> None:
    if monotonic() - began > HANG_S:
        raise AssertionError(f"never: {what if isinstance(what, str) else what()}")
