"""Ctrl-C and SIGTERM end a command alike: by KeyboardInterrupt, which is shown as one line."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_USUAL = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
_LATER_S = 0.05


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt for both signals meanwhile, unless somebody else has taken or ignores them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = [number for number, usual in _USUAL.items() if signal.getsignal(number) == usual]
    before = {number: signal.signal(number, _interrupt) for number in (*taken, signal.SIGALRM)}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Interrupt, but not an import: numpy can't be begun again then, others take it for a missing package."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            signal.setitimer(signal.ITIMER_REAL, _LATER_S)
            return
        frame = frame.f_back
    raise KeyboardInterrupt
