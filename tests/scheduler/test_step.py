"""A step's tokens: decodes first, then as much prefill as running streams bear."""

import random
from statistics import median

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
    assert 0.5e-3 < costs.prefill_token_s(500) < 1.5e-3


def test_decodes_are_measured_alone_first_and_again_before_long() -> None:
    costs = MeasuredCosts()
    scheduler = make(4000, costs=costs, max_num_batched_tokens=2048, prefix_caching=False)
    add(scheduler, ask(4, 2000))
    step(scheduler)
    add(scheduler, *[ask(300, 1) for _ in range(5)])
    alone = []
    for number in range(200):
        plan = step(scheduler)
        assert plan is not None
        prefill = plan.num_tokens - plan.num_decodes
        seconds = 5e-3 + prefill * 1e-3
        costs.observe(num_decodes=1, prefill_tokens=prefill, depth=plan.ends[-1], seconds=seconds)
        if not prefill:
            alone.append(number)
        if not scheduler.waiting.num_waiting:
            add(scheduler, ask(300, 1))
    assert alone == [0, 1, 2, 67, 132, 197]
    assert costs.decode_s(1) == pytest.approx(5e-3)


@pytest.mark.parametrize("stall", [0.5, 30.0])
@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_stall_among_decodes_does_not_let_prefill_run_wild(stall: float, at: int) -> None:
    costs = MeasuredCosts(prefill_token_s=1e-4)
    scheduler = make(40_000, costs=costs, max_num_batched_tokens=2048, prefix_caching=False)
    add(scheduler, ask(4, 2000), ask(4, 2000))
    alone, wild = 0, 0
    for number in range(400):
        if len(scheduler.requests()) < 4:
            add(scheduler, ask(300, 1))
        plan = step(scheduler)
        assert plan is not None
        prefill = plan.num_tokens - plan.num_decodes
        seconds = 5e-3 + prefill * 1e-4
        if plan.num_decodes == 2 and not prefill:
            seconds += stall if alone == at else 0
            alone += 1
        costs.observe(
            num_decodes=plan.num_decodes, prefill_tokens=prefill, depth=plan.ends[-1], seconds=seconds
        )
        wild += number > 20 and plan.num_decodes > 0 and seconds > 3 * 5e-3
    assert wild <= 20


@pytest.mark.parametrize("stall", [0.5, 30.0])
def test_an_inter_token_goal_lets_several_run_again_after_a_stall(stall: float) -> None:
    costs = MeasuredCosts(prefill_token_s=1e-4)
    scheduler = make(4000, costs=costs, max_num_seqs=16, itl_slo_s=0.2)
    add(scheduler, *[ask(4, 60) for _ in range(40)])
    side_by_side = []
    for _ in range(3000):
        plan = step(scheduler)
        if plan is None:
            break
        seconds = 4e-3 + 1e-4 * (plan.num_tokens - plan.num_decodes)
        if plan.num_decodes == 2 and stall:
            seconds, stall = stall, 0.0
        side_by_side.append(plan.num_decodes)
        costs.observe(
            num_decodes=plan.num_decodes,
            prefill_tokens=plan.num_tokens - plan.num_decodes,
            depth=plan.ends[-1],
            seconds=seconds,
        )
    assert max(side_by_side) == 16
    assert len(side_by_side) < 400


@pytest.mark.parametrize("believed", [1e-3, 1e-5])
@pytest.mark.parametrize(("fixed", "token"), [(10e-3, 2e-5), (2e-3, 2e-5), (1e-3, 1e-4), (0.0, 1e-4)])
def test_a_cost_of_prefill_as_such_does_not_keep_chunks_small(
    believed: float, fixed: float, token: float
) -> None:
    truth = FixedCosts(step_s=5e-3, decode_token_s=0.0, prefill_token_s=token, prefill_step_s=fixed)
    costs = MeasuredCosts(prefill_token_s=believed)
    scheduler = make(4000, costs=costs, max_num_batched_tokens=2048, prefix_caching=False)
    noise = random.Random(0)
    add(scheduler, ask(4, 2000))
    chunks = []
    for number in range(600):
        if len(scheduler.requests()) < 3:
            add(scheduler, ask(300, 1))
        plan = step(scheduler)
        assert plan is not None
        prefill = plan.num_tokens - plan.num_decodes
        took = truth.decode_s(plan.num_decodes)
        if prefill:
            took += truth.prefill_step_s() + prefill * truth.prefill_token_s(0)
        costs.observe(
            num_decodes=plan.num_decodes,
            prefill_tokens=prefill,
            depth=plan.ends[-1],
            seconds=took * noise.uniform(0.95, 1.05),
        )
        if number >= 300:
            chunks.append(prefill)
    added = max(0.7 * 5e-3, 2 * fixed)  # what streams bear
    assert 0.5 < median(chunks) / ((added - fixed) / token) < 2


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
