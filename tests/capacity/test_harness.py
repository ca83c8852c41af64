"""The scheduler under faults: everybody ends once, with the tokens they get alone, and nothing leaks."""

from array import array
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from itertools import islice

import pytest

from kvq.scheduler import FixedCosts, SchedulerConfig
from tests.capacity.harness import (
    BlindModel,
    Faults,
    Given,
    Mix,
    Outcome,
    Pools,
    Setup,
    SimulatedRequest,
    SimulationResult,
    fuzz,
    jobs,
    simulate,
)

SEEDS, STEPS = 120, 120
SMALL = Setup(
    pools=Pools(num_blocks=[32], block_size=4, windows=[None], host_blocks=16),
    config=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=32),
)
BUSY = Mix(rate=40.0, prompt_tokens=12, output_tokens=10, longest=40, prefix_share=0.5, branched_share=0.2)
OFTEN = Faults(
    allocation=0.02, slow_step=0.02, cancel=0.02, nan=0.02, host_corruption=0.3, preemption=0.05, pin=0.02
)


def job(
    length: int = 8, max_tokens: int | None = 4, arrival_s: float = 0.0, **options: object
) -> SimulatedRequest:
    prompt = array("I", range(length))
    return SimulatedRequest(arrival_s=arrival_s, prompt=prompt, max_tokens=max_tokens, **options)  # type: ignore[arg-type]


def ended(result: SimulationResult) -> bool:
    """Requests came, and each has an outcome; what else is promised, `fuzz` checks in every step."""
    return bool(result.records) and all(record.outcome is not None for record in result.records)


@pytest.mark.daily(2)
@pytest.mark.parametrize("first", range(0, SEEDS, 30))
def test_random_engines_keep_every_promise_under_random_faults(first: int) -> None:
    for seed in range(first, first + 30):
        assert ended(fuzz(seed, steps=STEPS)), f"seed {seed}"


@pytest.mark.long
def test_10_000_random_engines_keep_them_for_1_000_steps() -> None:
    with ProcessPoolExecutor(2) as pool:
        total = sum(pool.map(_steps, range(100_000, 110_000), chunksize=50))
    assert total > 8_000_000


def _steps(seed: int) -> int:
    return len(fuzz(seed, steps=1000).gauges)


@pytest.mark.parametrize("seed", [2361])  # overtaken by who came in the step in which it aged
def test_runs_that_once_broke_a_promise_keep_it(seed: int) -> None:
    assert ended(fuzz(seed, steps=1000))


@pytest.mark.parametrize("seed", [1, 7, 20])
def test_the_same_seed_gives_the_same_run(seed: int) -> None:
    first, again, other = (fuzz(n, steps=100) for n in (seed, seed, seed + 1))
    assert first == again
    assert first.digest != other.digest


def test_faults_change_the_run_and_are_themselves_decided_by_the_seed() -> None:
    digests = [
        simulate(islice(jobs(BUSY, 3), 60), SMALL, faults=faults, seed=seed).digest
        for faults, seed in [(None, 1), (None, 2), (OFTEN, 1), (OFTEN, 1), (OFTEN, 2)]
    ]
    assert digests[0] == digests[1]  # without faults a seed has nothing to decide
    assert digests[2] == digests[3]
    assert len({digests[0], digests[2], digests[4]}) == 3


@pytest.fixture(scope="module")
def calm() -> SimulationResult:
    return simulate(islice(jobs(BUSY, 5), 150), SMALL, seed=5, check_every=10)


def test_without_faults_everybody_finishes_however_short_memory_is(calm: SimulationResult) -> None:
    assert calm.count(Outcome.FINISHED) == 150
    summary = calm.summary()
    assert summary["preemptions"] > 0
    assert summary["mean_live"] > 0.5


def test_records_tell_the_life_of_every_request(calm: SimulationResult) -> None:
    assert [record.number for record in calm.records] == list(range(150))
    for record in calm.records:
        assert record.first_token_s is not None
        assert record.admitted_s is not None
        assert record.last_token_s is not None
        assert record.end_s is not None
        assert record.arrival_s <= record.admitted_s < record.first_token_s <= record.last_token_s
        assert record.last_token_s <= record.end_s
        assert record.tokens > 0
    assert sum(record.cached_tokens for record in calm.records) > 0


def test_the_summary_adds_up(calm: SimulationResult) -> None:
    summary = calm.summary()
    assert summary["steps"] == len(calm.gauges)
    assert summary["requests"] == sum(summary[outcome.value] for outcome in Outcome)
    assert summary["tokens_per_s"] == pytest.approx(summary["tokens"] / calm.seconds)
    assert 0 < summary["ttft_p50_s"] <= summary["ttft_p90_s"] <= summary["ttft_p99_s"]
    assert 0 < summary["itl_p50_s"] <= summary["itl_p99_s"]
    assert calm.seconds == pytest.approx(calm.gauges[-1].now_s + calm.gauges[-1].seconds)


@pytest.mark.parametrize("name", [field.name for field in fields(Faults)])
def test_each_fault_alone_leaves_its_traces_and_nothing_else_behind(name: str) -> None:
    faults = replace(Faults(), **{name: 0.4 if name == "host_corruption" else 0.05})
    setup = replace(SMALL, costs=FixedCosts(move_block_s=1e-9))
    mix = replace(BUSY, session_share=0.5) if name == "hint" else BUSY  # which are about sessions
    result = simulate(islice(jobs(mix, 5), 150), setup, faults=faults, seed=5, check_every=10)
    calm = simulate(islice(jobs(mix, 5), 150), setup, seed=5)
    assert result.digest != calm.digest
    assert sum(map(result.count, Outcome)) == 150
    assert (result.count(Outcome.CANCELLED) > 0) == (name == "cancel")
    assert (result.count(Outcome.FAILED) > 0) >= (name == "nan")
    assert result.count(Outcome.FAILED) == 0 or name in ("nan", "allocation")
    if name == "slow_step":
        assert result.seconds > 1.5 * calm.seconds
    if name == "preemption":
        assert result.summary()["preemptions"] > calm.summary()["preemptions"] + 10


def test_a_request_that_can_never_fit_is_refused_when_it_comes() -> None:
    result = simulate([job(60, 69), job(60, 70), job(5, 2)], SMALL)
    assert [record.outcome for record in result.records] == [
        Outcome.FINISHED, Outcome.REFUSED, Outcome.FINISHED,
    ]  # fmt: skip
    assert result.records[1].end_s == result.records[1].arrival_s
    assert "can never fit" in result.records[1].reason


def test_users_who_lose_patience_cancel() -> None:
    patient, impatient = job(8, 50), job(8, 50, patience_s=0.05)
    result = simulate([patient, impatient], SMALL)
    assert [record.outcome for record in result.records] == [Outcome.FINISHED, Outcome.CANCELLED]
    assert result.records[1].end_s == pytest.approx(0.05, abs=0.01)


def test_the_clock_advances_by_what_steps_cost_and_skips_idle_time() -> None:
    setup = replace(SMALL, costs=FixedCosts(step_s=1.0, decode_token_s=0.0, prefill_token_s=0.25))
    result = simulate([job(8, 3), job(8, 1, arrival_s=100.0)], setup)
    assert [gauge.seconds for gauge in result.gauges] == [3.0, 1.0, 1.0, 1.25]  # seven tokens were cached
    assert [record.first_token_s for record in result.records] == [3.0, 101.25]
    assert result.gaps_s == [1.0, 1.0]


def test_no_jobs_are_taken_after_the_last_step() -> None:
    result = simulate(jobs(BUSY, 1), SMALL, max_steps=50)
    assert len(result.gauges) >= 50
    assert all(record.outcome is Outcome.FINISHED for record in result.records)


def test_a_blind_model_serves_long_contexts() -> None:
    pools = Pools(num_blocks=[4000], block_size=16, windows=[None])
    setup = Setup(pools=pools, config=SchedulerConfig())
    mix = Mix(rate=5.0, prompt_tokens=3000, output_tokens=20, longest=20_000)
    result = simulate(islice(jobs(mix, 1), 30), setup, model=BlindModel())
    assert result.count(Outcome.FINISHED) == 30


def test_what_is_given_is_not_left_to_the_seed() -> None:
    given = Given(faults=Faults(), requests=12, rate=1000.0, blocks=40, block_size=8, max_num_seqs=2)
    result = fuzz(9, steps=1000, given=given)
    assert len(result.records) == 12
    assert result.records[-1].arrival_s < 0.2
    assert result.count(Outcome.FAILED) == 0
    assert max(gauge.running for gauge in result.gauges) <= 2
