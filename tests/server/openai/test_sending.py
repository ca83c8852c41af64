"""Server-sent events to readers who stop reading, leave, or see a failure."""

import asyncio
import json

import pytest

from kvq.server.http.problems import last_event, unavailable
from kvq.server.openai import respond
from kvq.server.openai.respond import _MAX_BEHIND, _EventStream
from tests.waiting import HANG_S, wait_for_async

PATH = "/v1/completions"


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """Nobody is cut off who is only slow, unless a test says so."""
    monkeypatch.setattr(respond, "_PATIENCE_S", HANG_S)


class Reader:
    """The other end: takes what is sent while its gate is open."""

    def __init__(self):
        self.gate, self.gone, self.got, self.aborted = asyncio.Event(), asyncio.Event(), [], False
        self.gate.set()

    def abort(self):
        self.aborted = True
        self.gone.set()

    async def send(self, message):
        await self.gate.wait()
        self.got.append(message)

    async def receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}

    @property
    def body(self):
        return b"".join(message.get("body", b"") for message in self.got)


async def numbers(count, size, closed, fail=None):
    try:
        for i in range(count):
            await asyncio.sleep(0)
            yield {"i": i, "text": "x" * size}
        if fail is not None:
            raise fail
    finally:
        closed.append(True)


async def run(reader, chunks, **options):
    ends = []
    stream = _EventStream(
        chunks, PATH, on_cut=lambda: ends.append("cut"), on_end=lambda: ends.append("end"), **options
    )
    await stream({"type": "http", "state": {"kvq_transport": reader}}, reader.receive, reader.send)
    return ends


def events(body):
    return [json.loads(line[6:]) for line in body.decode().split("\n\n") if line.startswith("data: {")]


def test_everything_arrives_in_order_and_the_stream_ends():
    async def main():
        reader, closed = Reader(), []
        assert await run(reader, numbers(500, 300, closed)) == ["end"]
        assert [event["i"] for event in events(reader.body)] == list(range(500))
        assert reader.body.endswith(last_event(PATH))
        assert reader.got[-1]["more_body"] is False
        assert closed == [True]

    asyncio.run(main())


def test_a_reader_who_stops_is_cut_off_with_bounded_memory(monkeypatch):
    monkeypatch.setattr(respond, "_PATIENCE_S", 0.05)

    async def main():
        reader, closed, made = Reader(), [], 0

        async def endless():
            nonlocal made
            async for chunk in numbers(1_000_000, 1000, closed):
                made += 1
                if made == 50:
                    reader.gate.clear()
                yield chunk

        assert await asyncio.wait_for(run(reader, endless()), HANG_S) == ["cut", "end"]
        assert reader.aborted
        assert made * 1000 < 50 * 1000 + _MAX_BEHIND + 5000
        assert len(reader.body) <= 51 * 1100

    asyncio.run(main())


def test_a_burst_is_no_fault_of_its_reader():
    async def main():
        reader, closed = Reader(), []

        async def burst():  # what one step brings: nothing here waits
            for i in range(300):
                yield {"i": i, "text": "x" * 1000}
            closed.append(True)

        assert await run(reader, burst()) == ["end"]
        assert [event["i"] for event in events(reader.body)] == list(range(300))
        assert reader.body.endswith(last_event(PATH))

    asyncio.run(main())


def test_a_slow_reader_within_bounds_gets_everything():
    async def main():
        reader, closed = Reader(), []
        reader.gate.clear()
        running = asyncio.create_task(run(reader, numbers(40, 500, closed)))
        await wait_for_async(lambda: closed, "all of it to be made")
        assert not reader.got
        reader.gate.set()
        assert await running == ["end"]
        assert len(events(reader.body)) == 40

    asyncio.run(main())


def test_a_reader_who_leaves_ends_the_work():
    async def main():
        reader, closed = Reader(), []

        async def endless():
            try:
                while True:
                    await asyncio.sleep(0.001)
                    yield {"i": 0}
            finally:
                closed.append(True)

        running = asyncio.create_task(run(reader, endless()))
        await wait_for_async(lambda: len(reader.got) > 2, "the first events")
        reader.gone.set()
        assert await asyncio.wait_for(running, HANG_S) == ["end"]
        assert closed == [True]

    asyncio.run(main())


def test_failures_are_the_last_event_and_say_nothing_of_foreign_texts():
    async def main():
        for fail, kind in (
            (unavailable("gone"), "service_unavailable"),
            (ValueError("canary"), "server_error"),
        ):
            reader, closed = Reader(), []
            assert await run(reader, numbers(3, 10, closed, fail)) == ["end"]
            *_, last = events(reader.body)
            assert last["error"]["type"] == kind
            assert b"canary" not in reader.body
            assert last_event(PATH) not in reader.body

    asyncio.run(main())
