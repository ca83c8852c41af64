"""A line of jobs over readers that do nothing: who waits is always served."""

import asyncio

from kvq.server.reading.jobs import Numbers, Text
from kvq.server.reading.lane import Lane
from tests.waiting import HANG_S

JOB = Text(text="a", special=True, plain=False, max_tokens=None)


class Reader:
    async def do(self, pieces, job):
        await asyncio.sleep(0)
        return Numbers(packed=b"")

    def yield_to_others(self, niceness):
        pass


class Readers:
    async def fork(self):
        return Reader()

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
