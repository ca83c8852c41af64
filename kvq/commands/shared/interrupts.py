"""Interrupts: Ctrl-C and SIGTERM end a command with a KeyboardInterrupt, reported as one line."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, MappingProxyType
from typing import NoReturn

_USUAL = MappingProxyType({signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL})
_RETRY_S = 0.05  # delay before an interrupt during an import is raised again


@contextmanager
def interruptible() -> Iterator[None]:  # D358: SIGTERM acts as Ctrl-C; imports are completed first
    """Raise KeyboardInterrupt on SIGINT and SIGTERM inside the block, unless they are ignored or handled."""
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


@contextmanager
def nothing_begun() -> Iterator[None]:
    """Let a signal end the process even during an import inside the block; there is nothing to clean up.

    This includes an earlier signal that is waiting for the end of an import.
    """
    taken = [number for number in (*_USUAL, signal.SIGALRM) if signal.getsignal(number) is _interrupt]
    if signal.SIGALRM in taken and signal.getitimer(signal.ITIMER_REAL)[0]:
        _end()
    for number in taken:
        signal.signal(number, _leave)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, _interrupt)


@contextmanager
def cancelling(cancel: Callable[[], object]) -> Iterator[None]:
    """Call `cancel` on a signal inside the block, and raise KeyboardInterrupt at the end of the block.

    A KeyboardInterrupt raised inside an event loop would end the running task and might never reach the
    waiting code.
    """
    has_come = False

    def take(number: int, frame: FrameType | None) -> None:
        nonlocal has_come
        has_come = True
        cancel()

    is_main = threading.current_thread() is threading.main_thread()
    numbers = (*_USUAL, signal.SIGALRM) if is_main else ()
    taken = [number for number in numbers if callable(signal.getsignal(number))]
    before = {number: signal.signal(number, take) for number in taken}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if has_come:
            raise KeyboardInterrupt


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, but never inside an import; during an import, retry until the import ends.

    An interrupted import of numpy can't be repeated, and some packages mistake the interruption for a missing
    package.
    """
    is_importing = _is_importing(frame)
    # Repeated, because a signal in another thread does not wake this thread from a sleep
    signal.setitimer(signal.ITIMER_REAL, *((_RETRY_S, _RETRY_S) if is_importing else (0, 0)))
    if not is_importing:
        raise KeyboardInterrupt


def _leave(number: int, frame: FrameType | None) -> None:
    if _is_importing(frame):
        _end()
    raise KeyboardInterrupt


def _end() -> NoReturn:
    for number in (*_USUAL, signal.SIGALRM):  # a second interrupt would print the line again
        signal.signal(number, lambda *_: None)
    os.write(2, b"kvq: interrupted\n")
    os._exit(130)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            return True
        frame = frame.f_back
    return False
