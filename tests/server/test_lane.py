"""A line of jobs over readers that do nothing: who waits is always served."""

import asyncio

from kvq.server.reading import lane as lane_module
from kvq.server.reading.jobs import Job, JobResult
from kvq.server.reading.lane import Lane
from tests.waiting import HANG_S

JOB = Job(task="encode", given={"text": "a"})


class Reader:
    def __init__(self, yielded=None):
        self.yielded = yielded

    async def do(self, pieces, job):
        await asyncio.sleep(0)
        if self.yielded is not None:  # a job that takes until somebody minds
            await self.yielded.wait()
        return JobResult(packed=b"")

    def yield_to_others(self, niceness):
        if self.yielded is not None:
            self.yielded.set()


class Readers:
    def __init__(self, is_slow=False):
        self.is_slow = is_slow

    async def fork(self):
        return Reader(asyncio.Event() if self.is_slow else None)

    async def end(self, reader):
        return None


def test_who_comes_in_the_moment_in_which_a_line_is_empty_is_served():
    """Nobody else comes who would set the line to work."""

    async def client(lane, name, count):
        for _ in range(count):
            await lane.do(JOB, tenant=name, num_bytes=1, deadline_s=HANG_S / 4)

    async def main():
        lane = Lane(Readers(), width=1)
        await client(lane, "a", 30)
        for width in (1, 2):
            lane = Lane(Readers(), width=width)
            await asyncio.gather(*(client(lane, name, 100) for name in "abc"))
            assert lane.num_waiting == 0

    asyncio.run(main())


def test_whose_jobs_were_slow_yield_sooner():
    """A template that does not end computes for long, one reader after the other."""

    async def took_s(lane, name):
        began = asyncio.get_running_loop().time()
        await lane.do(JOB, tenant=name, num_bytes=1, deadline_s=HANG_S)
        return asyncio.get_running_loop().time() - began

    async def main():
        lane = Lane(Readers(is_slow=True), width=2)
        soon_s = lane_module._SOON_S
        assert await took_s(lane, "slow") >= soon_s
        assert soon_s / 5 > lane_module._WARY_SOON_S
        wary, other = await asyncio.gather(took_s(lane, "slow"), took_s(lane, "other"))
        assert wary < other, "it was told to yield before the other"

    asyncio.run(main())


def test_a_reader_whose_end_is_cancelled_takes_no_other_job():
    """Its job was slow, so it is ended; the line is closed meanwhile."""
    begun, jobs = asyncio.Event(), []

    class Ending(Readers):
        async def fork(self):
            reader = await super().fork()
            reader.is_ended = False
            return reader

        async def end(self, reader):
            reader.is_ended = True
            begun.set()
            await asyncio.Event().wait()

    async def main():
        readers = Ending(is_slow=True)
        lane = Lane(readers, width=1)
        await lane.do(JOB, tenant="a", num_bytes=1, deadline_s=HANG_S)
        await begun.wait()
        for task in list(lane._working):
            task.cancel()
        await asyncio.sleep(0)
        jobs.extend(lane._idle)

    asyncio.run(main())
    assert not jobs
