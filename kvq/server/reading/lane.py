"""Job queue of the prompt readers, fair across tenants."""

import asyncio
import contextlib
import signal
from collections import Counter
from dataclasses import dataclass, field
from time import monotonic
from typing import cast

import msgspec

from kvq.errors import EngineError
from kvq.scheduler.fair_queue import FairQueue
from kvq.server.engine.frames import encode
from kvq.server.http.loop_budget import closing
from kvq.server.http.problems import unavailable
from kvq.server.reading.jobs import Job, JobResult, in_pieces
from kvq.server.reading.readers import Reader, Readers

_PROCESSOR_S = 1.0  # processor time limit of a job with little text
_PER_BYTE_S = 4e-6  # added per byte of text; on a slow core, tokenizers take a quarter of this
_SOON_S = 0.25  # a job that takes longer yields to all other processes
_NICENESS = 5  # with lower priority, jobs would miss deadlines while other processes are busy
_WARY_S = 10.0  # after such a job, its tenant does not get the last reader for this long
# D290: keys with slow prompts yield after 25 ms
_WARY_SOON_S = 0.025  # jobs of such a tenant yield sooner, since until then they slow down everyone's tokens


class Overran(Exception):
    """Error: a job exceeded its limit on processor time or memory, and its reader was killed."""


@dataclass(slots=True, eq=False)
class _Work:
    pieces: list[str]  # pieces of the job's long texts
    job: bytes  # encoded
    may_s: float  # limit on processor time
    answer: asyncio.Future[JobResult] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # marks it as retrieved, even if no caller waits any more


class Lane:
    """Queue for jobs of one kind, of which `width` run at a time, independently of other lanes."""

    def __init__(self, readers: Readers, *, width: int, max_waiting: int | None = None) -> None:
        """`width`: number of jobs that run at the same time."""
        self._readers = readers
        self._width = width
        self._max_waiting = max_waiting
        self._line: FairQueue[_Work] = FairQueue()
        self._idle: list[Reader] = []
        self._working: set[asyncio.Task[None]] = set()
        self._num_at_work: Counter[str] = Counter()  # running jobs per tenant
        self._wary_until_s: dict[str, float] = {}
        self.num_waiting = 0  # unfinished jobs, including running ones

    async def do(self, job: Job, *, tenant: str, num_bytes: int, deadline_s: float) -> JobResult:
        """Run a job; return its result. `num_bytes`: approximate input size. `deadline_s` includes the wait.

        Raises:
            UnicodeEncodeError: a text of the job is not valid Unicode.
            Overran: the job exceeded its limit on processor time or memory.
            Problem: too many jobs are waiting.
            TimeoutError: the job did not finish in time.
            KVQError: no reader can be started.
        """
        if self._max_waiting is not None and self.num_waiting >= self._max_waiting:
            raise unavailable(f"{self.num_waiting} texts wait already to be tokenized; try again later")
        may_s = _PROCESSOR_S + num_bytes * _PER_BYTE_S
        pieces, short = in_pieces(msgspec.structs.replace(job, processor_s=may_s))
        work = _Work(pieces, encode(short), may_s)
        self._line.put(tenant, work)
        self.num_waiting += 1
        try:
            if len(self._working) < self._width:
                task = asyncio.create_task(self._work())
                self._working.add(task)
                task.add_done_callback(self._working.discard)
            async with asyncio.timeout(deadline_s):
                return await work.answer
        finally:
            self.num_waiting -= 1
            self._line.remove(work)
            work.answer.cancel()

    def close(self) -> None:
        """Fail the waiting jobs. `Readers.close` ends the readers."""
        for task in self._working:
            task.cancel()
        while (taken := self._line.take()) is not None:
            taken[1].fail(closing())

    def forget(self) -> None:
        """Forget the idle readers, which `Readers.stop` ended."""
        self._idle.clear()

    async def _work(self) -> None:
        """Run one job after another until none is left."""
        reader = self._idle.pop() if self._idle else None
        try:
            while (taken := self._line.take(self._passed_over())) is not None:
                tenant, work = taken
                self._num_at_work[tenant] += 1
                began = monotonic()
                try:
                    own, reader = reader or await self._readers.fork(), None  # kept on success
                    soon_s = _WARY_SOON_S if tenant in self._wary_until_s else _SOON_S
                    reader = await self._do(own, work, soon_s)
                except Exception as error:  # noqa: BLE001 - fails only this job
                    work.fail(error)
                except asyncio.CancelledError:
                    work.fail(closing())
                    raise
                finally:
                    self._note(tenant, monotonic() - began)
        finally:
            if reader is not None:
                self._idle.append(reader)
            # Not in the task's callback: a job that arrives before then would wait for an ended worker
            self._working.discard(cast("asyncio.Task[None]", asyncio.current_task()))

    def _passed_over(self) -> list[str]:
        """Return recently slow tenants that occupy all readers but one; the last reader is left to others."""
        now = monotonic()
        self._wary_until_s = {tenant: until for tenant, until in self._wary_until_s.items() if until > now}
        most = max(1, self._width - 1)
        return [tenant for tenant in self._wary_until_s if self._num_at_work[tenant] >= most]

    def _note(self, tenant: str, seconds: float) -> None:
        """Charge a tenant for the duration of a finished job."""
        self._line.charge(tenant, seconds)
        self._num_at_work[tenant] -= 1
        if not self._num_at_work[tenant]:
            del self._num_at_work[tenant]
        if seconds > _SOON_S:
            self._wary_until_s[tenant] = monotonic() + _WARY_S

    async def _do(self, reader: Reader, work: _Work, soon_s: float) -> Reader | None:
        """Run one job; return the reader if it can be reused, else None."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(soon_s, reader.yield_to_others, _NICENESS)
        try:
            answer = await reader.do(work.pieces, work.job)
        except BaseException:  # if abandoned, it would return this result for the next job
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
        if timer.when() <= loop.time():  # the priority was lowered, which is irreversible
            await self._readers.end(reader)
            return None
        return reader


def _why(status: int | None, may_s: float) -> Exception:
    """Return the error that explains a reader's exit status."""
    if status == -signal.SIGPROF:
        return Overran(f"more than {may_s:.1f} s of processor time")
    if status in (None, 0, -signal.SIGKILL):  # killed from outside
        return EngineError("the process that reads prompts was ended; send the request again")
    return Overran("more memory than it may, or crashes")
