"""A step's tokens: decodes first, then as much prefill as running streams bear."""

import pytest

from kvq.scheduler import FixedCosts, MeasuredCosts, Priority
from tests.scheduler.helpers import add, ask, drain, make, step

COSTS = FixedCosts(step_s=5e-3, decode_token_s=0.0, prefill_token_s=1e-4)


def test_decodes_come_first_and_the_budget_of_tokens_is_kept() -> None:
    scheduler = make(200, max_num_seqs=4, max_num_batched_tokens=12, max_step_stretch=100.0)
    short = [ask(4, 50) for _ in range(3)]
    add(scheduler, *short)
    step(scheduler)
    add(scheduler, ask(100, 2))
    for _ in range(5):
        plan = step(scheduler)
        assert plan is not None
        assert plan.num_decodes == 3
        assert [branch.request for branch in plan.branches[:3]] == short
        assert plan.counts == [1, 1, 1, 9]
        assert plan.num_tokens == 12
        assert plan.samples == [True, True, True, False]


def test_a_prompt_is_computed_in_chunks_whose_tokens_follow_each_other() -> None:
    scheduler = make(max_num_batched_tokens=10, max_num_seqs=4)
    long = ask(35, 1)
    add(scheduler, long)
    plans = [step(scheduler) for _ in range(4)]
    assert [plan.counts for plan in plans if plan] == [[10], [10], [10], [5]]
    assert [token for plan in plans if plan for token in plan.token_ids] == list(long.tokens)
    assert not scheduler.has_work


def test_a_request_may_limit_its_own_chunks() -> None:
    scheduler = make()
    add(scheduler, ask(10, 1, max_chunk=4))
    assert [plan.counts for _ in range(3) if (plan := step(scheduler))] == [[4], [4], [2]]


@pytest.mark.parametrize(
    ("running", "expected"),
    [
        ([Priority.INTERACTIVE], 25),  # 5 ms stretched by half leave 2.5 ms, at 0.1 ms a token
        ([Priority.BATCH], 99),
        ([Priority.BATCH, Priority.INTERACTIVE], 25),
    ],
)
def test_prefill_beside_interactive_streams_keeps_to_the_stretched_step(
    running: list[Priority], expected: int
) -> None:
    scheduler = make(100, costs=COSTS, max_num_seqs=8, max_num_batched_tokens=100, max_step_stretch=1.5)
    add(scheduler, *[ask(4, 50, priority=priority) for priority in running])
    step(scheduler)
    add(scheduler, ask(200, 1))
    plan = step(scheduler)
    assert plan is not None
    assert plan.counts[-1] == pytest.approx(expected, abs=1)


def test_an_inter_token_goal_takes_the_place_of_the_stretch() -> None:
    scheduler = make(100, costs=COSTS, max_num_batched_tokens=300, itl_slo_s=15.05e-3)
    add(scheduler, ask(4, 50))
    step(scheduler)
    add(scheduler, ask(320, 1))
    chunks = [plan.counts[1] for _ in range(4) if (plan := step(scheduler))]
    assert chunks == [32, 64, 100, 100]  # doubled at most from step to step


def test_measured_costs_stay_careful_when_a_chunk_seems_to_cost_nothing() -> None:
    costs = MeasuredCosts()
    costs.observe(num_decodes=0, prefill_tokens=64, depth=64, seconds=64e-3)
    for _ in range(20):
        costs.observe(num_decodes=8, prefill_tokens=0, depth=0, seconds=20e-3)
    costs.observe(num_decodes=8, prefill_tokens=48, depth=500, seconds=20e-3)  # noise: nothing added
    assert costs.prefill_token_s(500) == pytest.approx(0.5e-3, rel=0.1)


def test_decode_steps_are_estimated_before_any_was_run_without_prefill() -> None:
    costs = MeasuredCosts()
    assert costs.decode_s(8) == 0
    costs.observe(num_decodes=0, prefill_tokens=100, depth=100, seconds=0.1)
    costs.observe(num_decodes=8, prefill_tokens=16, depth=100, seconds=36e-3)
    assert costs.decode_s(8) == pytest.approx(20e-3, rel=0.05)
    costs.observe(num_decodes=8, prefill_tokens=0, depth=0, seconds=19e-3)
    assert costs.decode_s(8) == pytest.approx(19e-3)


def test_a_first_token_in_danger_gets_a_larger_share() -> None:
    counts = {}
    for now in (0.0, 0.95):
        scheduler = make(100, costs=COSTS, max_num_batched_tokens=300, max_step_stretch=1.5, ttft_slo_s=1.0)
        add(scheduler, ask(4, 50))
        step(scheduler)
        add(scheduler, ask(200, 1))
        plan = step(scheduler, now)
        assert plan is not None
        counts[now] = plan.counts[1]
    assert counts[0.0] in (24, 25)
    assert counts[0.95] in (29, 30)  # 0.05 s are left, 6.7 steps of 7.5 ms


def test_slow_prefill_gets_its_least_chunk_and_ends() -> None:
    slow = FixedCosts(step_s=1e-3, prefill_token_s=1.0)
    scheduler = make(costs=slow, min_chunk=3)
    add(scheduler, ask(4, 50))
    step(scheduler)
    add(scheduler, ask(10, 1))
    assert [plan.counts for _ in range(4) if (plan := step(scheduler))] == [[1, 3], [1, 3], [1, 3], [1, 1]]
    drain(scheduler)
