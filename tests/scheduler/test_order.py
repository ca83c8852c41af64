"""Whose turn it is: interactive before batch, tenants in turn, nobody for ever."""

from kvq.scheduler import Priority, Request, Scheduler
from tests.scheduler.helpers import add, ask, drain, make, step

BATCH = Priority.BATCH


def admitted(scheduler: Scheduler, requests: list[Request], *, step_s: float = 0.01) -> list[int]:
    """The order in which requests start, as indices; all of them run to their end."""
    order: list[int] = []
    now = 0.0
    while scheduler.has_work:
        now += step_s
        step(scheduler, now)
        order += [i for i, r in enumerate(requests) if r.admitted_s is not None and i not in order]
    return order


def test_interactive_requests_go_before_batch_ones_that_came_earlier() -> None:
    scheduler = make(max_num_seqs=1)
    requests = [ask(priority=BATCH), ask(priority=BATCH), ask(), ask()]
    add(scheduler, *requests)
    assert admitted(scheduler, requests) == [2, 3, 0, 1]


def test_a_batch_request_that_waited_long_enough_goes_before_later_interactive_ones() -> None:
    scheduler = make(max_num_seqs=1, aging_s=1.0)
    old = ask(priority=BATCH)
    add(scheduler, ask(4, 4), old)
    started_at = None
    for number in range(400):
        now = number * 0.02
        add(scheduler, ask(4, 4), now=now)  # more than it can serve
        step(scheduler, now)
        if old.admitted_s is not None:
            started_at = now
            break
    assert started_at is not None
    assert 1.0 <= started_at < 8.0  # behind those who were there when it had aged
    ahead = sum(
        request.arrival_s > 1.0 and request.admitted_s is not None for request in scheduler.requests()
    )
    assert ahead == 0


def test_who_waited_long_enough_goes_before_all_who_came_in_one_long_step() -> None:
    scheduler = make(max_num_seqs=1, aging_s=1.0)
    first, old, late = ask(4, 2), ask(priority=BATCH), [ask() for _ in range(5)]
    add(scheduler, first, old)
    step(scheduler)
    add(scheduler, *late, now=1.5)
    while old.admitted_s is None:
        assert step(scheduler, 1.5) is not None
        assert all(request.admitted_s is None for request in late)


def test_one_tenants_flood_does_not_keep_another_tenant_waiting() -> None:
    scheduler = make(max_num_seqs=2)
    flood = [ask(tenant="loud") for _ in range(100)]
    add(scheduler, *flood)
    for _ in range(10):
        step(scheduler)
    single = ask(tenant="quiet")
    add(scheduler, single)
    steps = 0
    while single.admitted_s is None:
        steps += 1
        step(scheduler)
    assert steps <= 5  # as soon as one of the two rows is free
    assert sum(request.admitted_s is None for request in flood) > 80


def test_two_tenants_with_the_same_demand_are_served_alike() -> None:
    scheduler = make(max_num_seqs=4)
    loud = [ask(tenant="loud") for _ in range(200)]
    add(scheduler, *loud)
    quiet = [ask(tenant="quiet") for _ in range(50)]
    add(scheduler, *quiet)
    for _ in range(100):
        step(scheduler)
    served = [sum(request.admitted_s is not None for request in some) for some in (loud, quiet)]
    assert abs(served[0] - served[1]) <= 4


def test_a_tenant_that_was_idle_has_no_claim_to_a_burst() -> None:
    scheduler = make(max_num_seqs=2)
    add(scheduler, *[ask(tenant="busy") for _ in range(300)])
    for _ in range(200):
        step(scheduler)
    late = [ask(tenant="late") for _ in range(40)]
    add(scheduler, *late)
    before = scheduler.counters.ended
    for _ in range(60):
        step(scheduler)
    ended = scheduler.counters.ended - before
    assert sum(request.admitted_s is not None for request in late) < 0.7 * ended


def test_requests_of_one_tenant_start_in_order_of_arrival() -> None:
    scheduler = make(max_num_seqs=3)
    requests = [ask() for _ in range(20)]
    add(scheduler, *requests)
    assert admitted(scheduler, requests) == list(range(20))


def test_a_cancelled_request_leaves_every_line() -> None:
    scheduler = make(max_num_seqs=1)
    requests = [ask(priority=priority) for priority in (Priority.INTERACTIVE, Priority.INTERACTIVE, BATCH)]
    add(scheduler, *requests)
    step(scheduler)
    for request in requests[::-1]:
        scheduler.end(request)
    assert not scheduler.has_work
    assert scheduler.requests() == []
    assert scheduler.schedule(0.0) is None


def test_a_newcomer_starts_level_with_whom_was_served_last_although_nobody_waits() -> None:
    scheduler = make(max_num_seqs=1)
    old = [ask(64, 1, tenant="old") for _ in range(4)]
    add(scheduler, *old)
    admitted(scheduler, old)
    requests = [
        ask(64, 1, tenant="new"),
        ask(64, 1, tenant="new"),
        ask(64, 1, tenant="new"),
        ask(tenant="old"),
    ]
    add(scheduler, *requests)
    assert 3 in admitted(scheduler, requests)[:2]


def test_batch_requests_that_waited_for_a_prefix_still_go_after_interactive_ones() -> None:
    scheduler = make(max_num_seqs=1)
    shared = [ask(40, 2, first=7, priority=BATCH) for _ in range(4)]
    add(scheduler, *shared)
    step(scheduler, 0.01)
    interactive = ask()
    scheduler.waiting.wake()
    for request in shared[1:]:  # as if each had been parked and woken
        if request in scheduler.waiting.queue:
            scheduler.waiting.queue.remove(request)
            scheduler.waiting._ready[BATCH].append(request)
    add(scheduler, interactive, now=0.01)
    assert admitted(scheduler, [interactive, *shared[1:]])[0] == 0


def test_those_held_up_are_told_from_those_without_a_row_or_their_turn() -> None:
    scheduler = make(24, max_num_seqs=4, max_num_batched_tokens=16)
    add(scheduler, ask(16, 1), ask(16, 1))
    step(scheduler)
    assert (scheduler.waiting.num_waiting, scheduler.num_held_up) == (1, 0)  # the step was full
    drain(scheduler)
    add(scheduler, *[ask(8, 9) for _ in range(6)])
    while scheduler.running.num_sequences < 4:
        step(scheduler)
    assert (scheduler.waiting.num_waiting, scheduler.num_held_up) == (2, 0)  # there is no row
    drain(scheduler)
    add(scheduler, ask(8, 9), ask(92, 1), ask(8, 1))
    for _ in range(3):
        step(scheduler)
    assert scheduler.running.num_sequences == 1
    assert (scheduler.waiting.num_waiting, scheduler.num_held_up) == (2, 2)  # of 24 blocks the first needs 23
    drain(scheduler)
    assert scheduler.num_held_up == 0


def test_preempted_requests_are_held_up() -> None:
    scheduler = make(24, max_num_seqs=8)
    add(scheduler, *[ask(8, 33) for _ in range(6)])
    while not scheduler.waiting.preempted:
        step(scheduler)
    assert scheduler.num_held_up >= len(scheduler.waiting.preempted)
    drain(scheduler)
