"""A line of jobs that is fair by tenant, and the readers that work it off."""

import asyncio
import contextlib
import signal
from collections import Counter
from dataclasses import dataclass, field
from time import monotonic
from typing import cast

import msgspec

from kvq.errors import EngineError
from kvq.fair_line import FairLine
from kvq.server.engine.frames import encode
from kvq.server.http.problems import unavailable
from kvq.server.reading.jobs import FromReader, Job, Piece, in_pieces
from kvq.server.reading.readers import Reader, Readers

_PROCESSOR_S = 1.0  # that a job may take which reads little
_PER_BYTE_S = 4e-6  # and for each byte of what it reads: tokenizers take a quarter of it on a slow core
_SOON_S = 0.25  # a job that takes longer yields to whatever else wants to run
_NICENESS = 5  # lower, and beside busy processes it would not come to its end in time
_WARY_S = 10.0  # since a tenant's job took longer than that: it does not get the last reader
_WARY_SOON_S = 0.025  # and its jobs yield sooner: a reader that has not is in the way of everybody's tokens


class Overran(Exception):
    """A job took more processor time or memory than it may, and ended its reader."""


@dataclass(slots=True, eq=False)
class _Work:
    pieces: list[Piece]  # of the job's long texts
    job: bytes  # encoded
    may_s: float  # of processor time
    answer: asyncio.Future[FromReader] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # seen, even if nobody waits any more


class Lane:
    """Jobs of one kind, so many at a time; none of another kind waits for them."""

    def __init__(self, readers: Readers, *, width: int, max_waiting: int | None = None) -> None:
        """`width`: jobs side by side."""
        self._readers = readers
        self._width = width
        self._max_waiting = max_waiting
        self._line: FairLine[_Work] = FairLine()
        self._idle: list[Reader] = []
        self._working: set[asyncio.Task[None]] = set()
        self._num_at_work: Counter[str] = Counter()  # by tenant
        self._wary_until_s: dict[str, float] = {}
        self.num_waiting = 0  # jobs that are not done yet

    async def do(self, job: Job, *, tenant: str, num_bytes: int, deadline_s: float) -> FromReader:
        """A job's answer. `num_bytes`: about what it reads; `deadline_s`: the wait in line included.

        Raises:
            UnicodeEncodeError: a text in it is none.
            Overran: the job takes more than it may.
            Problem: too many wait already.
            TimeoutError: it was not done in time.
            KVQError: there are no readers.
        """
        if self._max_waiting is not None and self.num_waiting >= self._max_waiting:
            raise unavailable(f"{self.num_waiting} texts wait already to be tokenized; try again later")
        may_s = _PROCESSOR_S + num_bytes * _PER_BYTE_S
        pieces, short = in_pieces(msgspec.structs.replace(job, processor_s=may_s))
        work = _Work(pieces, encode(short), may_s)
        self._line.put(tenant, work)
        self.num_waiting += 1
        try:
            self._set_to_work()
            async with asyncio.timeout(deadline_s):
                return await work.answer
        finally:
            self.num_waiting -= 1
            self._line.remove(work)
            work.answer.cancel()

    def close(self) -> None:
        """Forget whoever waits; the readers are ended by who has made them."""
        for task in self._working:
            task.cancel()
        while (taken := self._line.take()) is not None:
            taken[1].fail(_closing())

    def _set_to_work(self) -> None:
        if len(self._working) < self._width:
            task = asyncio.create_task(self._work())
            self._working.add(task)
            task.add_done_callback(self._working.discard)

    async def _work(self) -> None:
        """Do one job after the other until none is left."""
        reader = self._idle.pop() if self._idle else None
        try:
            while (taken := self._line.take(self._passed_over())) is not None:
                tenant, work = taken
                self._num_at_work[tenant] += 1
                began = monotonic()
                try:
                    own, reader = reader or await self._readers.fork(), None  # kept if its job ends well
                    soon_s = _WARY_SOON_S if tenant in self._wary_until_s else _SOON_S
                    reader = await self._do(own, work, soon_s)
                except Exception as error:  # noqa: BLE001 - one job's failure is not the others'
                    work.fail(error)
                except asyncio.CancelledError:
                    work.fail(_closing())
                    raise
                finally:
                    self._note(tenant, monotonic() - began)
        finally:
            if reader is not None:
                self._idle.append(reader)
            # Not when the loop comes to it: who comes until then would wait for somebody who has left.
            self._working.discard(cast("asyncio.Task[None]", asyncio.current_task()))

    def _passed_over(self) -> list[str]:
        """Whose jobs were slow, and hold all readers but one: that one is for others."""
        now = monotonic()
        self._wary_until_s = {tenant: until for tenant, until in self._wary_until_s.items() if until > now}
        most = max(1, self._width - 1)
        return [tenant for tenant in self._wary_until_s if self._num_at_work[tenant] >= most]

    def _note(self, tenant: str, seconds: float) -> None:
        """A tenant's job is done."""
        self._line.charge(tenant, seconds)
        self._num_at_work[tenant] -= 1
        if not self._num_at_work[tenant]:
            del self._num_at_work[tenant]
        if seconds > _SOON_S:
            self._wary_until_s[tenant] = monotonic() + _WARY_S

    async def _do(self, reader: Reader, work: _Work, soon_s: float) -> Reader | None:
        """Do one; returns the reader, if it can do others."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(soon_s, reader.yield_to_others, _NICENESS)
        try:
            answer = await reader.do(work.pieces, work.job)
        except BaseException:  # given up within a job, it would answer the next one with this one's
            with contextlib.suppress(OSError):
                await asyncio.shield(self._readers.end(reader))
            raise
        finally:
            timer.cancel()
        if answer is None:
            work.fail(_why(await self._readers.end(reader), work.may_s))
            return None
        if not work.answer.done():
            work.answer.set_result(answer)
        if timer.when() <= loop.time():  # it has yielded, which nobody can take back
            await self._readers.end(reader)
            return None
        return reader


def _closing() -> EngineError:
    return EngineError("the server is shutting down")


def _why(status: int | None, may_s: float) -> Exception:
    """What ended a reader."""
    if status == -signal.SIGPROF:
        return Overran(f"more than {may_s:.1f} s of processor time")
    if status in (None, 0, -signal.SIGKILL):  # somebody else
        return EngineError("the process that reads prompts was ended; send the request again")
    return Overran("more memory than it may, or crashes")
