"""What deciding costs: microseconds per running request, and nothing for those that wait.

Counted is the thread's own processor time: others on the machine take the clock's, not this. The bounds are
lenient still, since they share caches; 1.4 us were measured.
"""

from time import thread_time

import pytest

from kvq.scheduler import Priority, Scheduler
from tests.scheduler.helpers import add, ask, commit, make


def loaded(running: int, waiting: int) -> Scheduler:
    """A scheduler whose rows all decode, while others wait."""
    scheduler = make(running * 12, block_size=16, max_num_seqs=running, max_num_batched_tokens=2048)
    add(scheduler, *[ask(40, 120, priority=Priority.BATCH) for _ in range(running)])
    while scheduler.waiting.num_waiting or any(not b.num_generated for b in scheduler.running.active):
        plan = scheduler.schedule(0.0)
        assert plan is not None
        commit(scheduler, plan)
    add(scheduler, *[ask(4, 4) for _ in range(waiting)])
    return scheduler


def best_schedule_s(*schedulers: Scheduler, repeats: int = 60) -> list[float]:
    """Seconds of the fastest `schedule()` of each, in turns, so that the machine's moods meet all."""
    times: list[list[float]] = [[] for _ in schedulers]
    for _ in range(repeats):
        for scheduler, took in zip(schedulers, times, strict=True):
            began = thread_time()
            plan = scheduler.schedule(0.0)
            took.append(thread_time() - began)
            assert plan is not None
            assert plan.num_decodes == scheduler.config.max_num_seqs
            commit(scheduler, plan)
    return [min(took) for took in times]


@pytest.mark.parametrize("running", [256, 1000])
def test_a_running_request_costs_few_microseconds_a_step(running: int) -> None:
    assert best_schedule_s(loaded(running, 0))[0] / running < 8e-6


def test_ten_thousand_waiting_requests_cost_next_to_nothing() -> None:
    few, many = best_schedule_s(loaded(1000, 1), loaded(1000, 10_000))
    assert many < 1.5 * few + 1e-4
