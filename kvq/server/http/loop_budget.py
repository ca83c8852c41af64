"""Event loop's time: a budget for work in slices of milliseconds, and the longest stretch without a pause."""

import asyncio
import selectors
from collections.abc import Callable, Iterator
from enum import Enum
from time import perf_counter, thread_time

from kvq.errors import EngineError
from kvq.scheduler.fair_queue import FairQueue

_SHARE = 0.25  # of the loop's time
_LONG_S = 0.003  # a slice that delays everybody's tokens
_LONG_SHARE = 0.05  # of the loop's time for such slices
_HOPS = 3  # rounds of the loop in which a slice's result is used
_AT_ONCE_S = 0.005  # that first steps may take at once
_LEAST_S = 0.001  # that each of them counts, with the work that follows from it


class Again(Enum):
    """Answer of a step: whether and when to call it again."""

    NO = 0
    IN_TURN = 1  # after those that wait
    NEXT = 2  # before others of its owner: it holds much memory, and many such steps would together

    def __bool__(self) -> bool:
        return self is not Again.NO


class LoopBudget:
    """Runs slices of a few milliseconds, one at a time; between two of them the loop serves all others."""

    def __init__(self, share: float = _SHARE) -> None:
        """`share`: of the loop's time, unless slices are long."""
        self._share = share
        self._line: FairQueue[Callable[[], Again]] = FairQueue()
        self._is_running = False
        self._spare_s = _AT_ONCE_S
        self._counted_s = 0.0
        self._waiting: dict[asyncio.Future[None], list[Exception]] = {}  # and what to raise
        self._is_closed = False

    def add(self, owner: str, step: Callable[[], Again]) -> None:
        """Call `step` in its turn, and again as it returns."""
        self._line.put(owner, step)
        if not self._is_running:
            self._is_running = True
            asyncio.get_running_loop().call_soon(self._turn)

    def soon(self, owner: str, step: Callable[[], Again]) -> None:
        """Call `step` at once; in its turn if many were called at once lately, or if it asks for that."""
        if not self._has_spare() or self._at_once(step):
            self.add(owner, step)

    async def through(self, owner: str, steps: Iterator[Again]) -> None:
        """Run an iterator: to its first yield at once, from there on in turns.

        If many do this at the same time, all but a few begin in turn as well. Raises the iterator's
        exception, or EngineError if `close` was called before its end.
        """
        if self._is_closed:
            raise _closing()
        if self._has_spare() and not self._at_once(lambda: next(steps, Again.NO)):
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        failures: list[Exception] = []  # in a future, it and its traceback would keep each other alive

        def step() -> Again:
            if done.done():  # the caller was cancelled
                return Again.NO
            try:
                if again := next(steps, Again.NO):
                    return again
            except Exception as error:  # noqa: BLE001 - raised by `through`
                failures.append(error)
            done.set_result(None)
            return Again.NO

        self.add(owner, step)
        self._waiting[done] = failures
        try:
            await done
        finally:
            del self._waiting[done]
        if failures:
            raise failures.pop()

    def close(self) -> None:
        """Raise EngineError from all calls of `through`, now and later. Single steps go on."""
        self._is_closed = True
        for done, failures in self._waiting.items():
            if not done.done():
                failures.append(_closing())
                done.set_result(None)

    def _has_spare(self) -> bool:
        now = asyncio.get_running_loop().time()
        self._spare_s = min(_AT_ONCE_S, self._spare_s + (now - self._counted_s) * self._share)
        self._counted_s = now
        return self._spare_s > 0

    def _at_once(self, step: Callable[[], Again]) -> Again:
        began = perf_counter()
        try:
            return step()
        finally:
            self._spare_s -= max(_LEAST_S, perf_counter() - began)

    def _turn(self) -> None:
        taken = self._line.take()
        assert taken is not None, "it runs while somebody waits"
        owner, step = taken
        began = perf_counter()
        try:
            again = step()
            if again is Again.IN_TURN:
                self._line.put(owner, step)
            elif again is Again.NEXT:
                self._line.put_back(owner, step)
        finally:
            took_s = perf_counter() - began
            self._line.charge(owner, took_s)
            self._settle(began, _HOPS)

    def _settle(self, began_s: float, hops: int) -> None:
        """Rest after a slice, by its length and that of the work that followed from it at once."""
        loop = asyncio.get_running_loop()
        if hops:
            loop.call_soon(self._settle, began_s, hops - 1)
        elif self._line:
            took_s = perf_counter() - began_s
            share = self._share if took_s < _LONG_S else _LONG_SHARE
            loop.call_later(took_s * (1 / share - 1), self._turn)
        else:
            self._is_running = False


def _closing() -> EngineError:
    return EngineError("the server is shutting down")


class Stretches(selectors.DefaultSelector):
    """Selector of an event loop that notes the longest time that it computes while nobody else is served.

    Measures each stretch between two looks at the sockets, in processor time, whatever else the machine does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.longest_s = 0.0  # since the start
        self._since_s: float | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._since_s is not None:
            self.longest_s = max(self.longest_s, thread_time() - self._since_s)
        found: list[tuple[selectors.SelectorKey, int]] = super().select(timeout)
        self._since_s = thread_time()
        return found
