"""Slices of work: owners alternate, and the event loop runs between them."""

import asyncio
import contextlib
import gc
import weakref
from functools import partial
from time import thread_time

import pytest

from kvq.errors import EngineError
from kvq.server.http.loop_budget import Again, LoopBudget
from kvq.server.run import _Stretches
from tests.waiting import HANG_S


def test_what_ends_at_once_waits_for_nobody():
    budget = LoopBudget()
    asyncio.run(asyncio.wait_for(budget.through("", iter(())), HANG_S))
    assert len(budget._line) == 0


def test_owners_take_turns_and_others_run_between():
    seen = []

    async def main():
        budget = LoopBudget()

        def work(name, count):
            for i in range(count):
                yield Again.IN_TURN
                seen.append(f"{name}{i}")

        async def other():
            for _ in range(3):
                await asyncio.sleep(0)
                seen.append("-")

        await asyncio.gather(
            budget.through("a", work("a", 3)),
            budget.through("a", work("A", 3)),
            budget.through("b", work("b", 3)),
            other(),
        )

    asyncio.run(main())
    assert sorted(seen) == sorted([*"---", *(f"{name}{i}" for name in "aAb" for i in range(3))])
    assert seen.index("b2") < max(seen.index("a2"), seen.index("A2")), "a has two at work, and b one"
    assert seen.index("-") < seen.index("b2")


def test_a_failure_is_for_who_waits_and_the_others_go_on():
    async def main():
        budget = LoopBudget()

        def fail():
            yield Again.IN_TURN
            raise ValueError("no")

        def work():
            yield Again.IN_TURN
            yield Again.IN_TURN

        failed, done = await asyncio.gather(
            budget.through("a", fail()), budget.through("b", work()), return_exceptions=True
        )
        assert isinstance(failed, ValueError)
        assert done is None
        with pytest.raises(TimeoutError):  # who stops waiting stops the work
            await asyncio.wait_for(budget.through("a", iter(lambda: Again.IN_TURN, 0)), 0.01)
        await budget.through("b", work())

    asyncio.run(main())


def test_who_holds_much_is_next_of_its_owner():
    seen = []

    async def main():
        budget = LoopBudget()

        def work(name):
            yield Again.IN_TURN
            seen.append(f"{name} begins")
            yield Again.NEXT
            seen.append(f"{name} ends")

        await asyncio.gather(*(budget.through("a", work(name)) for name in "xyz"))

    asyncio.run(main())
    assert seen == [f"{name} {what}" for name in "xyz" for what in ("begins", "ends")]


def test_what_many_begin_at_once_is_spread():
    stretches = _Stretches()

    def work():
        began = thread_time()
        while thread_time() - began < 0.002:
            pass
        yield Again.IN_TURN

    async def main():
        budget = LoopBudget()
        await asyncio.gather(*(budget.through("a", work()) for _ in range(60)))

    with asyncio.Runner(loop_factory=partial(asyncio.SelectorEventLoop, stretches)) as runner:
        runner.run(main())
    assert stretches.longest_s < 0.03, "60 times 2 ms are 0.12 s"


def test_a_failure_leaves_no_garbage():
    """A body in a traceback's frames would live until somebody looks for garbage."""

    class Body:
        pass

    def fail(body):
        yield Again.IN_TURN
        yield Again.IN_TURN
        raise ValueError(f"no {type(body).__name__}")

    async def main():
        body = Body()
        seen = weakref.ref(body)
        with contextlib.suppress(ValueError):
            await LoopBudget().through("a", fail(body))
        del body
        for _ in range(5):
            await asyncio.sleep(0)
        return seen()

    gc.disable()
    try:
        assert asyncio.run(main()) is None
    finally:
        gc.enable()


def test_at_the_end_who_waits_is_told_and_single_steps_go_on():
    async def main():
        budget, seen = LoopBudget(), []
        waiting = asyncio.create_task(budget.through("a", iter(lambda: Again.IN_TURN, 0)))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        budget.add("b", lambda: seen.append("b") or Again.NO)
        budget.close()
        for late in (waiting, budget.through("a", iter(()))):
            with pytest.raises(EngineError, match="shutting down"):
                await asyncio.wait_for(late, HANG_S)
        while not seen:
            await asyncio.sleep(0.01)
        assert not budget._waiting

    asyncio.run(main())


def test_what_many_ask_for_at_once_is_done_in_turns():
    """Each asks for a step that is as good as nothing; what follows it is not."""
    done = []

    async def main():
        budget = LoopBudget()

        def step(number):
            done.append(number)
            return Again.NO

        loop = asyncio.get_running_loop()
        now_s = loop.time()
        loop.time = lambda: now_s  # all of it at one moment, however busy the machine is
        for number in range(100):
            budget.soon(str(number % 3), partial(step, number))
        del loop.time
        at_once = len(done)
        while len(done) < 100:
            await asyncio.sleep(0)
        return at_once

    assert 0 < asyncio.run(asyncio.wait_for(main(), HANG_S)) <= 10
    assert sorted(done) == list(range(100))
    for owner in range(3):
        assert [number for number in done if number % 3 == owner] == list(range(owner, 100, 3))


def test_a_step_that_wants_another_gets_it_in_its_turn():
    seen = []

    async def main():
        budget = LoopBudget()

        def step():
            seen.append(len(seen))
            return Again.IN_TURN if len(seen) < 5 else Again.NO

        budget.soon("a", step)
        assert seen == [0]
        while len(seen) < 5:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(main(), HANG_S))
    assert seen == list(range(5))
