"""How long the event loop computes at a stretch: meanwhile nobody else is served."""

import asyncio
import selectors
from time import thread_time


class Stretches:
    """Sees each stretch between two looks at the sockets, in processor time: a busy machine is none of it."""

    def __init__(self) -> None:
        self.longest_s = 0.0  # since the start

    def make_loop(self) -> asyncio.AbstractEventLoop:
        """A loop that is seen."""
        return asyncio.SelectorEventLoop(_Selector(self))


class _Selector(selectors.DefaultSelector):
    def __init__(self, stretches: Stretches) -> None:
        super().__init__()
        self._stretches = stretches
        self._since_s: float | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._since_s is not None:
            self._stretches.longest_s = max(self._stretches.longest_s, thread_time() - self._since_s)
        found: list[tuple[selectors.SelectorKey, int]] = super().select(timeout)
        self._since_s = thread_time()
        return found
