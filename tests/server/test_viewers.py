"""All viewers share one snapshot, and the engine is asked no more often than it can bear."""

import asyncio
from types import SimpleNamespace

import pytest

from kvq.errors import EngineError
from kvq.server.engine.messages import EngineSnapshot
from kvq.server.engine.remote import State
from kvq.server.http.guard import basic_password
from kvq.server.viewers import _Viewers

METRICS = SimpleNamespace(total=lambda name: 0)


class Engine:
    """Counts how often it is looked at; `cost_s` is what a picture claims to have taken."""

    state, gauges, num_restarts = State.READY, None, 0

    def __init__(self, cost_s: float = 0.0) -> None:
        self.cost_s = cost_s
        self.num_looks = 0
        self.is_gone = False

    async def look(self) -> EngineSnapshot:
        self.num_looks += 1
        await asyncio.sleep(0)
        if self.is_gone:
            raise EngineError("gone")
        return EngineSnapshot(
            cost_s=self.cost_s, kv="int4", block_size=16, pools=[], tenants=[], live=[], past=[]
        )


class Clock:
    """Time passes when a test says so."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def viewers(engine: Engine, clock: Clock) -> _Viewers:
    return _Viewers(SimpleNamespace(name="tiny", remote=engine, why_not_ready=None, metrics=METRICS), clock)


def test_a_crowd_costs_the_engine_one_look():
    engine, clock = Engine(), Clock()

    async def crowd() -> None:
        shared = viewers(engine, clock)
        shown = await asyncio.gather(*(shared.show("", has_keys=False) for _ in range(50)))
        assert all(one["picture"] is not None for one in shown)
        assert engine.num_looks == 1
        clock.seconds += 0.3
        await shared.show("", has_keys=False)
        assert engine.num_looks == 2

    asyncio.run(crowd())


def test_dear_pictures_are_rare():
    engine, clock = Engine(cost_s=0.1), Clock()

    async def look_twice() -> None:
        shared = viewers(engine, clock)
        await shared.show("", has_keys=False)
        assert (await shared.show("", has_keys=False))["interval_s"] == pytest.approx(5.0)
        clock.seconds += 4.9
        await shared.show("", has_keys=False)
        assert engine.num_looks == 1
        clock.seconds += 0.2
        await shared.show("", has_keys=False)
        assert engine.num_looks == 2

    asyncio.run(look_twice())


def test_an_engine_that_is_gone_leaves_no_picture_behind():
    engine, clock = Engine(), Clock()

    async def lose() -> None:
        shared = viewers(engine, clock)
        assert (await shared.show("", has_keys=False))["picture"] is not None
        engine.is_gone = True
        clock.seconds += 0.3
        assert (await shared.show("", has_keys=False))["picture"] is None

    asyncio.run(lose())


@pytest.mark.parametrize(
    ("header", "password"),
    [
        (b"Basic YTpi", b"b"),
        (b"basic OmI6Yw==", b"b:c"),
        (b"Basic YQ==", b""),
        (b"Basic ?", b""),
        (b"Bearer YTpi", b""),
        (b"Basic", b""),
        (b"", b""),
    ],
)
def test_basic_passwords(header, password):
    assert basic_password(header) == password
