"""An engine starts once for all requests that wait, which are bounded, and stops only when it is idle."""

import asyncio

import pytest

from kvq.server.engine.remote import State
from kvq.server.http.problems import Problem
from kvq.server.models import hosted as module
from tests.server.models.kit import failing, hosted


def test_requests_wait_for_one_start_together():
    async def run():
        one = hosted()
        waiting = [asyncio.create_task(one.wait_for_engine()) for _ in range(7)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        assert one.is_to_start
        one.service.remote.may_start.set()
        assert await asyncio.gather(*waiting) == [True] * 7
        assert (one.service.remote.num_starts, one.is_to_start) == (1, False)
        assert await one.wait_for_engine()

    asyncio.run(run())


def test_beyond_the_queues_limit_a_request_is_told_when_to_come_again():
    async def run():
        one = hosted(max_queue=3)
        waiting = [asyncio.create_task(one.wait_for_engine()) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Problem, match="3 requests wait") as found:
            await one.wait_for_engine()
        assert (found.value.status, found.value.headers()) == (503, {"Retry-After": "10"})
        waiting[0].cancel()  # its client left: there is room again, and the start goes on
        await asyncio.sleep(0)
        waiting.append(asyncio.create_task(one.wait_for_engine()))
        one.service.remote.may_start.set()
        assert await asyncio.gather(*waiting[1:]) == [True] * 3

    asyncio.run(run())


def test_a_request_does_not_wait_longer_than_any_request_may():
    async def run():
        one = hosted(timeout_s=0.01)
        with pytest.raises(Problem, match="still starting"):
            await one.wait_for_engine()
        assert one.is_to_start  # the start itself goes on
        one.service.remote.may_start.set()
        await asyncio.sleep(0.01)
        assert await one.wait_for_engine()

    asyncio.run(run())


def test_a_failed_start_is_told_to_all_and_tried_again_later(monkeypatch):
    async def run():
        one = failing(hosted(), "no memory is left")
        found = await asyncio.gather(one.wait_for_engine(), one.wait_for_engine(), return_exceptions=True)
        assert all(isinstance(error, Problem) and "no memory is left" in str(error) for error in found)
        one.service.remote.error = None
        with pytest.raises(Problem, match="no memory is left") as again:
            await one.wait_for_engine()
        assert again.value.headers() == {"Retry-After": "30"}
        assert "no memory is left" in one.why_unavailable
        monkeypatch.setattr(module, "_RETRY_S", 0)
        assert await one.wait_for_engine()
        assert one.why_unavailable is None

    asyncio.run(run())


def test_an_engine_that_restarts_is_not_waited_for():
    async def run():
        one = hosted()
        one.service.remote.state = State.RESTARTING
        assert not one.is_to_start
        assert await one.wait_for_engine()  # the service then refuses the request

    asyncio.run(run())


def test_only_an_idle_engine_is_stopped_with_its_readers_and_the_next_request_starts_it():
    async def run():
        one = hosted(idle_s=0.02)
        one.service.remote.may_start.set()
        await one.wait_for_engine()
        with one.using():
            await asyncio.sleep(0.03)
            await one.stop_if_idle()
            assert one.service.remote.state is State.READY
        await one.stop_if_idle()  # it has just been used
        assert one.service.remote.state is State.READY
        await asyncio.sleep(0.03)
        await one.stop_if_idle()
        assert one.service.remote.state is State.STOPPED
        assert (one.service.prompts.num_stops, one.service.counting.num_stops) == (1, 1)
        assert one.why_unavailable is None
        assert await one.wait_for_engine()
        assert one.service.remote.num_starts == 2

    asyncio.run(run())


def test_without_a_time_an_engine_is_never_stopped():
    async def run():
        one = hosted()
        one.service.remote.may_start.set()
        await one.wait_for_engine()
        one._used_s = -1e9
        await one.stop_if_idle()
        assert one.service.remote.state is State.READY

    asyncio.run(run())


def test_a_stopped_version_and_the_end_of_the_server_start_nothing():
    async def run():
        one = hosted()
        one.is_stopped = True
        assert "operator" in one.why_unavailable
        one.is_stopped, one.service.is_draining = False, True
        assert await one.wait_for_engine()
        assert one.service.remote.num_starts == 0

    asyncio.run(run())
