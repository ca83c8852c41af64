"""What deciding costs: microseconds per running request, and nothing for those that wait.

The bounds are lenient, since the machines that run tests are shared; 1.4 us were measured.
"""

from time import perf_counter

import pytest

from kvq.scheduler import Priority
from tests.scheduler.helpers import add, ask, commit, make


def best_schedule_s(running: int, waiting: int, *, repeats: int = 40) -> float:
    """Seconds of the fastest `schedule()` while all rows decode and others wait."""
    scheduler = make(running * 8, block_size=16, max_num_seqs=running, max_num_batched_tokens=2048)
    add(scheduler, *[ask(40, 80, priority=Priority.BATCH) for _ in range(running)])
    while scheduler.lines.num_waiting or any(not b.num_generated for b in scheduler.holders.active):
        plan = scheduler.schedule(0.0)
        assert plan is not None
        commit(scheduler, plan)
    add(scheduler, *[ask(4, 4) for _ in range(waiting)])
    times = []
    for _ in range(repeats):
        began = perf_counter()
        plan = scheduler.schedule(0.0)
        times.append(perf_counter() - began)
        assert plan is not None
        assert plan.num_decodes == running
        commit(scheduler, plan)
    return min(times)


@pytest.mark.parametrize("running", [256, 1000])
def test_a_running_request_costs_few_microseconds_a_step(running: int) -> None:
    assert best_schedule_s(running, 0) / running < 8e-6


def test_ten_thousand_waiting_requests_cost_next_to_nothing() -> None:
    assert best_schedule_s(1000, 10_000) < 1.5 * best_schedule_s(1000, 1) + 1e-4
