"""A prefix that somebody is computing is worth waiting for."""

import pytest

from tests.scheduler.helpers import add, ask, drain, make, step


def test_requests_wait_for_the_prefix_that_another_computes() -> None:
    scheduler = make(200, max_num_batched_tokens=8, max_num_seqs=4)
    first = ask(40, 2, first=1, max_chunk=4)
    others = [ask(41, 2, first=1) for _ in range(3)]
    add(scheduler, first, *others)
    step(scheduler)
    step(scheduler)
    assert scheduler.waiting.num_parked == 3
    drain(scheduler)
    assert first.cached_tokens == 0
    assert [other.cached_tokens for other in others] == [40] * 3
    assert scheduler.counters.steps < 15  # instead of 20, were all four prompts computed


def test_waiting_does_not_hold_up_requests_that_share_nothing() -> None:
    scheduler = make(200, max_num_batched_tokens=16, max_num_seqs=4)
    add(scheduler, ask(40, 2, first=1, max_chunk=8), ask(41, 2, first=1))
    other = ask(4, 2)
    add(scheduler, other)
    plan = step(scheduler)
    assert plan is not None
    assert other in {branch.request for branch in plan.branches}


@pytest.mark.parametrize("ends", ["cancel", "preempt", "fail"])
def test_who_waits_goes_on_when_the_other_never_gets_there(ends: str) -> None:
    scheduler = make(200, max_num_batched_tokens=8, max_num_seqs=4)
    first, other = ask(40, 2, first=1, max_chunk=4), ask(41, 2, first=1)
    add(scheduler, first, other)
    step(scheduler)
    step(scheduler)
    assert scheduler.waiting.num_parked == 1
    if ends == "cancel":
        scheduler.end(first)
    elif ends == "preempt":
        scheduler.preempt(first, 0.0)
    else:
        scheduler.fail(first, ValueError())  # type: ignore[arg-type]
    drain(scheduler)
    assert other.branches[0].num_generated == 2


def test_one_that_waits_can_be_cancelled() -> None:
    scheduler = make(200, max_num_batched_tokens=8, max_num_seqs=4)
    first, other = ask(40, 2, first=1, max_chunk=4), ask(41, 2, first=1)
    add(scheduler, first, other)
    step(scheduler)
    step(scheduler)
    scheduler.end(other)
    assert scheduler.waiting.num_parked == 0
    drain(scheduler)
