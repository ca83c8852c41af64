"""Out of blocks: who gives way, who comes back, and that it does not go on for ever."""

from typing import Any

import pytest

from kvq.blockmgr import Demote
from kvq.errors import ConfigError, OutOfBlocks
from kvq.scheduler import FixedCosts, Priority, Request, Scheduler
from kvq.scheduler.request import RequestState
from kvq.scheduler.running import choose_victim
from tests.scheduler.helpers import RefusingManager, add, ask, commit, drain, make, step

CHEAP_MOVES = FixedCosts(move_block_s=1e-9)


def crowd(count: int, **options: Any) -> tuple[Scheduler, list[Request]]:
    """Requests that fit at first and not when they have grown: 10 blocks each in the end, 24 in all."""
    scheduler = make(24, max_num_seqs=8, **options)
    requests = [ask(8, 33) for _ in range(count)]
    add(scheduler, *requests)
    return scheduler, requests


@pytest.mark.parametrize("options", [{}, {"has_host": True}, {"has_host": True, "costs": CHEAP_MOVES}])
def test_everybody_ends_and_nobody_is_preempted_all_the_time(options: dict[str, Any]) -> None:
    scheduler, requests = crowd(12, **options)
    drain(scheduler)
    assert [request.branches[0].num_generated for request in requests] == [33] * 12
    assert not scheduler.take_failed()
    preemptions = [request.preemptions for request in requests]
    assert sum(preemptions) > 0
    assert max(preemptions) <= 4
    assert preemptions[0] == 0  # the oldest never gives way
    assert scheduler.counters.preemptions == sum(preemptions)
    restored = sum(request.usage.restored for request in requests)
    recomputed = sum(request.usage.recomputed for request in requests)
    assert (restored > 100) == bool(options)
    assert recomputed < 100 or not options


def test_preempted_requests_keep_their_place_before_waiting_ones() -> None:
    scheduler, requests = crowd(6)
    while not any(request.state is RequestState.PREEMPTED for request in requests):
        step(scheduler)
    victim = next(request for request in requests if request.state is RequestState.PREEMPTED)
    late = ask(8, 4)
    add(scheduler, late)
    while victim.state is RequestState.PREEMPTED:
        assert late.admitted_s is None
        step(scheduler)
    drain(scheduler)


def test_batch_requests_give_way_first() -> None:
    scheduler = make(24, max_num_seqs=8)
    batch = [ask(8, 33, priority=Priority.BATCH) for _ in range(2)]
    interactive = [ask(8, 33) for _ in range(2)]
    add(scheduler, *batch, *interactive)
    drain(scheduler)
    assert sum(request.preemptions for request in batch) > 0
    assert sum(request.preemptions for request in interactive) <= 1  # older batch ones stay


def test_a_prefill_displaces_nobody_older() -> None:
    scheduler = make(12, max_num_batched_tokens=8, max_num_seqs=4)
    old = ask(16, 17)  # 8 blocks in the end
    add(scheduler, old)
    step(scheduler)
    step(scheduler)
    add(scheduler, ask(32, 1))
    drain(scheduler)
    assert old.preemptions == 0


def test_a_request_can_be_preempted_by_hand_and_goes_on() -> None:
    scheduler = make()
    single, forked = ask(8, 6), ask(8, 6, num_branches=2)
    add(scheduler, single, forked)
    step(scheduler)
    step(scheduler)
    for request in (single, forked):
        scheduler.preempt(request, 0.0)
    with pytest.raises(ConfigError, match="preempted, not running"):
        scheduler.preempt(single, 0.0)
    drain(scheduler)
    for request in (single, forked):
        assert [branch.num_generated for branch in request.branches] == [6] * request.num_branches
    assert single.usage.recomputed == 1  # its whole blocks were still indexed
    assert forked.usage.recomputed == 3  # so was the prompt, but for its last token, which forks share


def lose(scheduler: Scheduler, request: Request, now: float = 0.0) -> None:
    """Preempt a request, whose blocks then go to host memory."""
    scheduler.preempt(request, now)
    scheduler.manager.below.give_up(scheduler.running.prompt(request), to_tiers=True)
    for order in scheduler.manager.take_orders():
        assert isinstance(order, Demote)
        assert scheduler.manager.blocks.tiers is not None
        scheduler.manager.blocks.tiers.put(order.key, bytes(8), order.form)


def test_however_often_a_request_is_preempted_its_blocks_come_back_from_host_memory() -> None:
    scheduler = make(has_host=True)
    request = ask(9, 30)
    add(scheduler, request)
    for round in range(1, 8):
        while request.branches[0].sequence is None or request.branches[0].num_generated < 4 * round:
            step(scheduler)
        lose(scheduler, request)
    drain(scheduler)
    assert request.branches[0].num_generated == 30
    assert request.preemptions == 7
    assert request.usage.restored == sum((9 + 4 * round - 1) // 4 * 4 for round in range(1, 8))
    assert request.usage.recomputed == 0
    assert (request.host_tokens, request.disk_tokens) == (0, 0), "these count what the prompt found"


@pytest.mark.parametrize(("windows", "restored"), [((None, 6), 36), ((6,), 8), ((None,), 36)])
def test_generated_tokens_come_back_also_those_in_windows(
    windows: tuple[int | None, ...], restored: int
) -> None:
    scheduler = make(windows=windows, has_host=True)
    request = ask(9, 40)
    add(scheduler, request)
    while request.branches[0].num_generated < 30:
        step(scheduler)
    lose(scheduler, request)
    drain(scheduler)
    assert request.branches[0].num_generated == 40
    assert request.usage.restored == restored
    assert request.usage.recomputed == 2


def test_who_gives_way_is_who_resumes_soonest_from_host_memory_or_by_computing() -> None:
    def victim(costs: FixedCosts, *, has_host: bool, groups: set[int] | None = None) -> str | None:
        scheduler = make(has_host=has_host, costs=costs, max_num_seqs=4)
        if (tiers := scheduler.manager.blocks.tiers) is not None:
            tiers.groups = groups
        oldest, long, forked = ask(4, 40), ask(40, 40), ask(8, 40, num_branches=2)
        add(scheduler, oldest, long, forked)
        for _ in range(8):
            step(scheduler)
        chosen = choose_victim([long, forked], scheduler.manager, scheduler.costs)
        return None if chosen is None else {long: "long", forked: "forked"}[chosen]

    assert victim(FixedCosts(move_block_s=1e-9), has_host=False) == "forked"
    assert victim(FixedCosts(move_block_s=1e-9), has_host=True) == "long"  # forks are computed anew
    assert victim(FixedCosts(move_block_s=1.0), has_host=True) == "forked"
    beside_ladder = victim(FixedCosts(move_block_s=1e-9), has_host=True, groups=set())
    assert beside_ladder == "forked", "host memory takes none of their blocks"


def test_who_is_preempted_and_comes_back_in_one_step_runs_once_in_it() -> None:
    scheduler = make(max_num_batched_tokens=20, max_num_seqs=4)
    old, young = ask(20, 6, max_chunk=2), ask(8, 6)
    add(scheduler, old, young)
    step(scheduler)
    assert isinstance(scheduler.manager, RefusingManager)
    scheduler.manager.refuses = (False, True)  # the decode of one, then the prefill of the other
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert young.preemptions == 1
    assert [branch.request for branch in plan.branches] == [old, young]
    commit(scheduler, plan)
    drain(scheduler)


def test_who_is_refused_everything_when_it_starts_alone_fails_with_the_reason() -> None:
    scheduler = make()
    request = ask()
    add(scheduler, request)
    assert isinstance(scheduler.manager, RefusingManager)
    scheduler.manager.refuses = (True,)
    assert scheduler.schedule(0.0) is None
    assert scheduler.take_failed() == [request]
    assert isinstance(request.error, OutOfBlocks)
    assert not scheduler.has_work


def test_a_pin_gives_way_to_who_fits_only_without_it() -> None:
    scheduler = make(10)
    add(scheduler, ask(8, 1, first=1), ask(12, 1, first=50))
    drain(scheduler)
    manager = scheduler.manager
    assert manager.pin(manager.prompt(range(1, 9)), until=2.0) == 8
    assert manager.pin(manager.prompt(range(50, 62)), until=1.0) == 12
    request = ask(30, 1)
    add(scheduler, request)
    drain(scheduler)
    assert request.branches[0].num_generated == 1
    assert [pin.until for pin in manager.pins.all()] == [2.0], "the pin that ends first gave way"


def test_who_does_not_fit_alone_beside_sequences_of_others_fails_with_the_reason() -> None:
    scheduler = make(10)
    other = scheduler.manager.new_sequence()
    scheduler.manager.append([(other, 20)])
    request = ask(30, 1)
    add(scheduler, request)
    assert scheduler.schedule(0.0) is None
    assert scheduler.take_failed() == [request]
    assert "sequences beside the scheduler's hold blocks" in str(request.error)
    assert not scheduler.has_work
    scheduler.manager.free(other)
    again = ask(30, 1)
    add(scheduler, again)
    drain(scheduler)
    assert again.branches[0].num_generated == 1


def test_a_pin_gives_way_to_who_grows_alone() -> None:
    scheduler = make(10)
    add(scheduler, ask(20, 1, first=1))
    drain(scheduler)
    manager = scheduler.manager
    assert manager.pin(manager.prompt(range(1, 21)), until=1.0) == 20
    request = ask(8, 30)
    add(scheduler, request)
    drain(scheduler)
    assert request.branches[0].num_generated == 30
    assert len(manager.pins) == 0


@pytest.mark.parametrize("priority", list(Priority))
def test_that_holds_for_preempted_requests_of_any_class(priority: Priority) -> None:
    scheduler = make(12)
    add(scheduler, ask(24, 1, first=1))
    drain(scheduler)
    request = ask(8, 20, priority=priority)
    add(scheduler, request)
    while len(request.branches[0].tokens) < 25:
        step(scheduler)
    scheduler.preempt(request, 0.0)
    manager = scheduler.manager
    assert manager.pin(manager.prompt(range(1, 25)), until=1.0) == 24  # six blocks are left, not seven
    drain(scheduler)
    assert request.error is None
    assert request.branches[0].num_generated == 20


@pytest.mark.parametrize(("goal_s", "expected"), [(None, 8), (5.35e-3, 3), (1e-6, 1)])
def test_a_batch_grows_no_larger_than_its_inter_token_goal_allows(
    goal_s: float | None, expected: int
) -> None:
    scheduler = make(200, max_num_seqs=8, itl_slo_s=goal_s)  # 5 ms a step and 0.1 ms a sequence
    add(scheduler, *[ask(4, 20) for _ in range(8)])
    most = 0
    for number in range(20):
        step(scheduler, number * 0.01)
        most = max(most, scheduler.running.num_sequences)
    assert most == expected
    drain(scheduler)
