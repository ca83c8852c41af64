"""Event loop time: a budget for work in slices of milliseconds, and the longest time without a pause."""

import asyncio
from collections.abc import Callable, Iterator
from enum import Enum
from time import perf_counter

from kvq.errors import EngineError
from kvq.scheduler.fair_queue import FairQueue

_SHARE = 0.25  # share of the loop's time
_LONG_S = 0.003  # slices of this length delay the tokens of all requests
_LONG_SHARE = 0.05  # share of the loop's time for such slices
_HOPS = 3  # loop iterations in which a slice's result is used
_AT_ONCE_S = 0.005  # budget for first steps that run immediately
_LEAST_S = 0.001  # minimum charge per first step, for the work that it causes


class Again(Enum):
    """Result of a step: tells whether and when to call the step again."""

    NO = 0
    IN_TURN = 1  # after the waiting steps
    NEXT = 2  # before its owner's other steps; few steps then hold much memory at once

    def __bool__(self) -> bool:
        return self is not Again.NO


class LoopBudget:
    """Scheduler that runs slices of a few milliseconds one at a time, with other loop work in between."""

    def __init__(self, share: float = _SHARE) -> None:
        """`share`: share of the loop's time for slices; long slices get a smaller share."""
        self._share = share
        self._line: FairQueue[Callable[[], Again]] = FairQueue()
        self._is_running = False
        self._spare_s = _AT_ONCE_S
        self._counted_s = 0.0
        self._waiting: dict[asyncio.Future[None], list[Exception]] = {}  # calls of `through`, and errors
        self._is_closed = False

    def add(self, owner: str, step: Callable[[], Again]) -> None:
        """Queue a call of `step`; the result of `step` determines further calls."""
        self._line.put(owner, step)
        if not self._is_running:
            self._is_running = True
            asyncio.get_running_loop().call_soon(self._turn)

    def soon(self, owner: str, step: Callable[[], Again]) -> None:
        """Call `step`, or queue the call if the budget is used up; the result determines further calls."""
        if not self._has_spare() or self._at_once(step):
            self.add(owner, step)

    async def through(self, owner: str, steps: Iterator[Again]) -> None:
        """Run an iterator: immediately up to its first yield, then taking turns with other steps.

        If many callers do this at the same time, most have to wait for their turn from the start. Raise the
        iterator's exception, or EngineError if `close` is called before the iterator ends.
        """
        if self._is_closed:
            raise closing()
        if self._has_spare() and not self._at_once(lambda: next(steps, Again.NO)):
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        failures: list[Exception] = []  # in a future, an error and its traceback would keep each other alive

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
        """Make all current and future calls of `through` raise EngineError. Other steps continue."""
        self._is_closed = True
        for done, failures in self._waiting.items():
            if not done.done():
                failures.append(closing())
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
        """Pause after a slice, in proportion to the time of the slice and of the work that it caused."""
        loop = asyncio.get_running_loop()
        if hops:
            loop.call_soon(self._settle, began_s, hops - 1)
        elif self._line:
            took_s = perf_counter() - began_s
            share = self._share if took_s < _LONG_S else _LONG_SHARE
            loop.call_later(took_s * (1 / share - 1), self._turn)
        else:
            self._is_running = False


def closing() -> EngineError:
    """Return the error for work that the shutdown cuts short."""
    return EngineError("the server is shutting down")
