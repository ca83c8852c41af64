"""Bodies of requests within their bounds."""

import asyncio

import pytest

from kvq.server.http import incoming
from kvq.server.http.incoming import Incoming
from kvq.server.http.problems import Problem


def receive(*messages):
    """An ASGI receiver that gives these and then the connection's end."""
    left = [*messages, {"type": "http.disconnect"}]

    async def next_message():
        return left.pop(0)

    return next_message


def piece(body, more=False):
    return {"type": "http.request", "body": body, "more_body": more}


def read(body, *messages, **limits):
    return asyncio.run(body.read(receive(*messages), **limits))


def test_a_body_is_read_whole_and_given_again():
    again = read(Incoming().body(), piece(b"ab", True), piece(b"c"))
    assert asyncio.run(again()) == piece(b"abc")
    assert asyncio.run(again()) == {"type": "http.disconnect"}


def test_a_client_that_goes_leaves_nothing():
    assert read(Incoming().body(), piece(b"ab", True)) is None


def test_all_bodies_share_their_room(monkeypatch):
    monkeypatch.setattr(incoming, "FREE", 0)
    line = Incoming(100)
    first, second = line.body(), line.body()
    read(first, piece(b"a" * 60), tenant="a")
    with pytest.raises(Problem, match="have 90 bytes; try again later") as refused:
        read(second, piece(b"a" * 30, True), piece(b"a" * 30), tenant="b")
    assert refused.value.status == 503
    assert refused.value.retry_after_s

    async def release():
        first.release()
        first.release()
        second.release()

    asyncio.run(release())
    assert line.num_bytes == 0
    with pytest.raises(Problem) as refused:
        read(line.body(), piece(b"a" * 61), most=60)
    assert refused.value.status == 413


def test_one_tenants_bodies_leave_a_quarter_to_others(monkeypatch):
    monkeypatch.setattr(incoming, "FREE", 0)
    line = Incoming(100)
    bodies = [line.body() for _ in range(4)]
    read(bodies[0], piece(b"a" * 75), tenant="a")
    with pytest.raises(Problem, match="your requests at hand have 75 bytes"):
        read(bodies[1], piece(b"a"), tenant="a")
    assert read(bodies[2], piece(b"a" * 25), tenant="b") is not None

    async def release():
        for body in bodies:
            body.release()

    asyncio.run(release())
    assert line.num_bytes == 0
    assert not line._of
    assert read(bodies[3], piece(b"a" * 75), tenant="a") is not None


def test_small_bodies_need_no_room():
    line = Incoming(10)
    for _ in range(100):
        assert read(line.body(), piece(b"a" * 60_000)) is not None
    assert line.num_bytes == 0
    with pytest.raises(Problem):
        read(line.body(), piece(b"a" * 70_000))


def test_a_slow_body_is_given_up(monkeypatch):
    monkeypatch.setattr(incoming, "BODY_S", 0.01)

    async def never():
        await asyncio.Event().wait()

    with pytest.raises(Problem) as refused:
        asyncio.run(Incoming().body().read(never))
    assert refused.value.status == 408


def test_memory_of_large_bodies_is_given_back(monkeypatch):
    monkeypatch.setattr(incoming, "_TRIM_S", 0)
    given = []
    monkeypatch.setattr(incoming, "give_back", lambda: given.append(1))

    async def main():
        line = Incoming()
        for size in (10, incoming.FREE + 1, incoming.FREE + 1):
            body = line.body()
            await body.read(receive(piece(b"a" * size)))
            body.release()
            body.release()
        await asyncio.sleep(0.05)

    asyncio.run(main())
    assert given == [1], "once for both large ones"
