"""Slices of work, in turns."""

import asyncio

import pytest

from kvq.server.turns import Turns


def test_what_ends_at_once_waits_for_nobody():
    asyncio.run(asyncio.wait_for(Turns().through("", iter(())), 1))


def test_owners_take_turns_and_others_run_between():
    seen = []

    async def main():
        turns = Turns()

        def work(name, count):
            for i in range(count):
                yield
                seen.append(f"{name}{i}")

        async def other():
            for _ in range(3):
                await asyncio.sleep(0)
                seen.append("-")

        await asyncio.gather(
            turns.through("a", work("a", 3)),
            turns.through("a", work("A", 3)),
            turns.through("b", work("b", 3)),
            other(),
        )

    asyncio.run(main())
    assert sorted(seen) == sorted([*"---", *(f"{name}{i}" for name in "aAb" for i in range(3))])
    assert seen.index("b2") < max(seen.index("a2"), seen.index("A2")), "a has two at work, and b one"
    assert seen.index("-") < seen.index("b2")


def test_a_failure_is_for_who_waits_and_the_others_go_on():
    async def main():
        turns = Turns()

        def fail():
            yield
            raise ValueError("no")

        def work():
            yield
            yield

        failed, done = await asyncio.gather(
            turns.through("a", fail()), turns.through("b", work()), return_exceptions=True
        )
        assert isinstance(failed, ValueError)
        assert done is None
        with pytest.raises(TimeoutError):  # who stops waiting stops the work
            await asyncio.wait_for(turns.through("a", iter(lambda: None, 0)), 0.01)
        await turns.through("b", work())

    asyncio.run(main())
