"""Work that keeps the event loop for milliseconds: a slice of one after the other, in a part of its time."""

import asyncio
from collections.abc import Callable, Iterator
from time import perf_counter

from kvq.fair_line import FairLine

_SHARE = 0.25  # of the loop's time


class Turns:
    """Slices of a few milliseconds, one at a time; between two of them everybody else has the loop."""

    def __init__(self) -> None:
        self._line: FairLine[Callable[[], bool]] = FairLine()
        self._is_running = False

    def add(self, owner: str, step: Callable[[], bool]) -> None:
        """Call `step` in its turn, and again as long as it returns True."""
        self._line.put(owner, step)
        if not self._is_running:
            self._is_running = True
            asyncio.get_running_loop().call_soon(self._turn)

    async def through(self, owner: str, steps: Iterator[None]) -> None:
        """Go through an iterator: to its first yield at once, from there on in turns.

        Raises what it raises.
        """
        if next(steps, steps) is steps:
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def step() -> bool:
            if done.done():  # nobody waits for it any more
                return False
            try:
                if next(steps, steps) is not steps:
                    return True
                done.set_result(None)
            except Exception as error:  # noqa: BLE001 - for who waits
                done.set_exception(error)
            return False

        self.add(owner, step)
        await done

    def _turn(self) -> None:
        taken = self._line.take()
        assert taken is not None, "it runs while somebody waits"
        owner, step = taken
        began = perf_counter()
        try:
            if step():
                self._line.put(owner, step)
        finally:
            took_s = perf_counter() - began
            self._line.charge(owner, took_s)
            self._is_running = len(self._line) > 0
            if self._is_running:
                asyncio.get_running_loop().call_later(took_s * (1 / _SHARE - 1), self._turn)
