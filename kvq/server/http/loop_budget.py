"""The event loop's time: work in slices of milliseconds, one after the other, and how long a stretch was."""

import asyncio
import selectors
from collections.abc import Callable, Iterator
from enum import Enum
from time import perf_counter, thread_time

from kvq.fair_line import FairLine

_SHARE = 0.25  # of the loop's time
_LONG_S = 0.003  # a slice that everybody feels who waits for a token
_LONG_SHARE = 0.05  # of the loop's time that such ones have
_HOPS = 3  # of the loop, in which whoever waited for a slice goes on with what it gave
_AT_ONCE_S = 0.005  # that first steps may take of it without a turn
_LEAST_S = 0.001  # that one of them counts: what follows it takes time as well


class Again(Enum):
    """When a step wants to be followed by another one of its kind."""

    NO = 0
    IN_TURN = 1  # after those who wait
    NEXT = 2  # before others of its owner: it holds much, and many such would together

    def __bool__(self) -> bool:
        return self is not Again.NO


class Closing(Exception):
    """Nothing more is begun, since the process ends."""


class LoopBudget:
    """Slices of a few milliseconds, one at a time; between two of them everybody else has the loop."""

    def __init__(self, share: float = _SHARE) -> None:
        """`share`: of the loop's time, unless slices are long."""
        self._share = share
        self._line: FairLine[Callable[[], Again]] = FairLine()
        self._is_running = False
        self._spare_s = _AT_ONCE_S
        self._counted_s = 0.0
        self._waiting: dict[asyncio.Future[None], list[Exception]] = {}  # and what to raise
        self._is_closed = False

    def add(self, owner: str, step: Callable[[], Again]) -> None:
        """Call `step` in its turn, and again as often as it asks for it."""
        self._line.put(owner, step)
        if not self._is_running:
            self._is_running = True
            asyncio.get_running_loop().call_soon(self._turn)

    def soon(self, owner: str, step: Callable[[], Again]) -> None:
        """Call `step` at once; in its turn, if many have been called at once lately, or it wants another."""
        if not self._has_spare() or self._at_once(step):
            self.add(owner, step)

    async def through(self, owner: str, steps: Iterator[Again]) -> None:
        """Go through an iterator: to its first yield at once, from there on in turns, as it yields.

        What many do at once is much together, so that all but a few of these begin in turn as well.
        Raises what it raises; Closing: `close` was called before it was through.
        """
        if self._is_closed:
            raise Closing
        if self._has_spare() and not self._at_once(lambda: next(steps, Again.NO)):
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        failures: list[Exception] = []  # a future that held one would live as long as its traceback, and back

        def step() -> Again:
            if done.done():  # nobody waits for it any more
                return Again.NO
            try:
                if again := next(steps, Again.NO):
                    return again
            except Exception as error:  # noqa: BLE001 - for who waits
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
        """Go through nothing any more; who waits is told so. Single steps go on."""
        self._is_closed = True
        for done, failures in self._waiting.items():
            if not done.done():
                failures.append(Closing())
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
        """Rest after a slice, by how long it took with all that followed from it at once."""
        loop = asyncio.get_running_loop()
        if hops:
            loop.call_soon(self._settle, began_s, hops - 1)
        elif self._line:
            took_s = perf_counter() - began_s
            share = self._share if took_s < _LONG_S else _LONG_SHARE
            loop.call_later(took_s * (1 / share - 1), self._turn)
        else:
            self._is_running = False


class Stretches:
    """How long the event loop computes at a stretch: meanwhile nobody else is served.

    Sees each stretch between two looks at the sockets, in processor time: a busy machine is none of it.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0  # since the start

    def make_loop(self) -> asyncio.AbstractEventLoop:
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
