"""Fleets with drafts: tokens a step as were assumed, steps as long as their parts, nothing left behind."""

from array import array
from dataclasses import replace

import pytest

from kvq.blockmgr.blocks import STATE_WINDOW
from kvq.capacity.fleet.arrivals import Call
from kvq.capacity.fleet.drafting import Drafting, parse_drafting
from kvq.capacity.fleet.faults import Faults
from kvq.capacity.fleet.fleet import FleetRun, FleetSpec, serve
from kvq.capacity.fleet.records import Fate, summarize
from kvq.capacity.fleet.replica import EngineSpec, Replica
from kvq.errors import ConfigError
from tests.capacity.fleet.kit import drawn, engine, load, step_time

ALWAYS = Drafting(k=4, acceptance=0.8, adapts=False)


def per_step(acceptance: float, k: int) -> float:
    """Leviathan et al. 2023, formula 1."""
    return (1 - acceptance ** (k + 1)) / (1 - acceptance)


def answers(number: int, tokens: int = 1500) -> list[Call]:
    """Requests that all come at once."""
    prompts = [array("I", range(i * 1000, i * 1000 + 16)) for i in range(number)]
    return [
        Call(number=i, arrival_s=0.0, prompt=prompt, output_tokens=tokens) for i, prompt in enumerate(prompts)
    ]


def served(spec: EngineSpec, calls: list[Call], drafting: Drafting | None) -> FleetRun:
    return serve(calls, FleetSpec(engine=replace(spec, drafting=drafting)))


@pytest.mark.parametrize(("acceptance", "k"), [(0.0, 3), (0.5, 1), (0.5, 4), (0.8, 4), (0.9, 16)])
def test_tokens_a_step_are_as_many_as_acceptance_gives(acceptance: float, k: int):
    drafting = Drafting(k=k, acceptance=acceptance, adapts=False)
    run = served(engine(2000, block_size=64), answers(8, 3000), drafting)
    found = summarize(run)
    drafted_steps = found["drafted_tokens"] / k
    mean = 1 + found["accepted_tokens"] / drafted_steps
    expected = per_step(acceptance, k)
    assert drafted_steps > 2000
    shares = [(1 - acceptance) * acceptance**right for right in range(k)] + [acceptance**k]
    variance = sum(share * (1 + right - expected) ** 2 for right, share in enumerate(shares))
    assert mean == pytest.approx(expected, abs=4 * (variance / drafted_steps) ** 0.5)
    assert found["tokens_per_step"] == pytest.approx(mean, rel=0.03)


@pytest.mark.parametrize("draft", [0.0, 0.1])
def test_one_alone_gains_what_its_steps_say(draft: float):
    """Seconds a token: verification and drafting over the tokens that they give."""
    spec = engine(2000, block_size=64)
    calls = answers(1, 4000)
    plain = served(spec, calls, None)
    drafting = Drafting(k=4, acceptance=0.8, draft=draft, adapts=False)
    run = served(spec, calls, drafting)
    time, gauges = spec.time, run.gauges[0]
    mean = 16 + 4000 / 2
    verify_s = time.linear_s(5) + time.read(time.seen([mean])) + time.sequence_s
    step_s = verify_s + 4 * draft * time.decode_s([mean])
    tokens = gauges.decoded_tokens / gauges.decodes
    expected = tokens * time.decode_s([mean]) / step_s
    assert expected > (3 if not draft else 2)
    assert plain.seconds / run.seconds == pytest.approx(expected, rel=0.01)


def test_what_is_read_of_a_sequence_is_read_once_for_all_of_its_drafts():
    spec = replace(engine(2000, block_size=64), time=replace(step_time(), read_s=(1e-4,)))
    drafting = Drafting(k=4, acceptance=1.0, adapts=False)
    calls = answers(1, 2001)
    plain, run = served(spec, calls, None), served(spec, calls, drafting)
    assert plain.seconds / run.seconds == pytest.approx(5, rel=0.02)


def test_where_arithmetic_is_the_limit_none_are_made():
    """64 at once, and each token costs as much as a draft is worth at most."""
    limited = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
    spec = engine(20000, **limited)
    spec = replace(spec, time=replace(spec.time, read_s=(0.0,), sequence_s=0.0))
    calls = answers(64, 400)
    plain = served(spec, calls, None)
    adaptive = served(spec, calls, Drafting(k=4, acceptance=0.6))
    always = served(spec, calls, Drafting(k=4, acceptance=0.6, adapts=False))
    assert adaptive.seconds == pytest.approx(plain.seconds, rel=0.02)
    assert adaptive.gauges[0].drafted_tokens < 0.02 * always.gauges[0].drafted_tokens
    assert always.seconds > 1.3 * plain.seconds


def test_where_reading_is_the_limit_as_many_are_made_as_pay():
    calls = answers(2)
    seconds = {
        acceptance: [
            served(
                engine(2000), calls, Drafting(k=8, acceptance=acceptance, draft=0.15, adapts=adapts)
            ).seconds
            for adapts in (True, False)
        ]
        for acceptance in (0.05, 0.5, 0.95)
    }
    plain = served(engine(2000), calls, None).seconds
    for adaptive, always in seconds.values():
        assert adaptive < 1.1 * min(plain, always)
    assert seconds[0.5][0] < 0.85 * min(plain, seconds[0.5][1])  # two drafts: better than none, better than 8


def test_prompts_beside_drafting_streams_get_their_turn():
    """Only of steps without drafts is learned what prompts add: where none came, prompts waited for ever."""
    calls = answers(1, 2000)
    calls += [replace(call, number=i, arrival_s=1.0 + 0.01 * i) for i, call in enumerate(answers(9, 50)) if i]
    plain, run = served(engine(2000), calls, None), served(engine(2000), calls, ALWAYS)
    waits = [max(one.records.first_s[i] - one.records.arrival_s[i] for i in range(9)) for one in (plain, run)]
    assert waits[1] < waits[0] + 0.1
    assert run.records.end_s[8] < run.records.end_s[0]


def test_steps_at_once_are_as_each_by_itself_and_nothing_stays_behind(monkeypatch: pytest.MonkeyPatch):
    replicas, begin, leap = [], Replica.__init__, Replica._leap
    seen = {"drafted": 0, "rested": 0, "preempted": 0, "failed": 0, "cancelled": 0, "split": 0}

    def beginning(self: Replica, *arguments: object, **options: object) -> None:
        replicas.append(self)
        begin(self, *arguments, **options)

    def leaping(self: Replica, until: float) -> bool:
        leapt = leap(self, until)
        seen["rested"] += leapt
        return leapt

    monkeypatch.setattr(Replica, "__init__", beginning)
    monkeypatch.setattr(Replica, "_leap", leaping)
    for seed in range(150):
        fleet, arrivals = drawn(seed)
        drafting = Drafting(
            k=1 + seed % 6, acceptance=seed % 10 / 10, draft=seed % 3 / 10, adapts=seed % 5 > 0, seed=seed
        )
        faults = Faults(seed=seed, leaving=0.3, slow_steps=0.05, life_s=0.5, restart_s=0.1)
        fleet = replace(fleet, engine=replace(fleet.engine, drafting=drafting))
        if seed % 2:
            fleet = replace(fleet, faults=faults)
        calls = list(arrivals.calls(12, seed))
        one, other = (serve(calls, fleet, leaps=leaps) for leaps in (True, False))
        assert one.digest == other.digest, f"seed {seed}"
        assert Fate.OPEN not in list(one.records.fate), f"seed {seed}"
        for replica in replicas:
            assert not replica.manager.sequences()
            assert not any(pool.num_live for pool in replica.manager.pools)
            assert not replica._guesser.depth._by_branch
            replica.manager.check_integrity()
        replicas.clear()
        seen["drafted"] += sum(gauge.drafted_tokens for gauge in one.gauges) > 0
        seen["preempted"] += sum(one.records.preemptions) > 0
        seen["failed"] += Fate.FAILED in list(one.records.fate)
        seen["cancelled"] += Fate.CANCELLED in list(one.records.fate)
        seen["split"] += fleet.prefill_replicas > 0
    assert min(seen.values()) >= 5, seen


def test_every_request_gets_its_tokens_and_the_gaps_are_the_time_between_them():
    calls = list(load(5.0).calls(100, 0))
    run = served(engine(), calls, ALWAYS)
    records = run.records
    assert set(records.fate) == {Fate.SERVED}
    assert run.gaps.count == sum(call.output_tokens - 1 for call in calls)
    assert run.gaps.total == pytest.approx(sum(records.end_s) - sum(records.first_s))
    assert run.gauges[0].decoded_tokens == sum(call.output_tokens - 1 for call in calls)


def test_the_seed_decides_which_are_right():
    calls = list(load(5.0).calls(50, 0))
    digests = [served(engine(), calls, replace(ALWAYS, seed=seed)).digest for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]


def test_replicas_draw_their_own():
    calls = [replace(call, prompt=call.prompt[:1]) for call in answers(2, 200)]
    run = serve(calls, FleetSpec(engine=replace(engine(), drafting=ALWAYS), replicas=2))
    assert run.records.end_s[0] != run.records.end_s[1]


def test_states_stay_in_their_blocks():
    """Of a hybrid: rejected drafts are computed again, no draft leaves the block in which a state lies."""
    spec = engine(400, windows=(None, STATE_WINDOW))
    spec = replace(spec, time=replace(spec.time, state_group=1), drafting=ALWAYS)
    run = serve(answers(4, 300), FleetSpec(engine=spec))
    assert set(run.records.fate) == {Fate.SERVED}
    assert run.gauges[0].accepted_tokens > 300
    assert run.gaps.count == 4 * 299


def test_what_is_typed_is_read():
    assert parse_drafting("k=3, acceptance=0.5,draft=0.1,adapts=False", "--x", 7) == Drafting(
        k=3, acceptance=0.5, draft=0.1, adapts=False, seed=7
    )
    assert parse_drafting("acceptance=1", "--x") == Drafting(acceptance=1.0)
    for none in (None, "", "off"):
        assert parse_drafting(none, "--x") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("k=4", "needs acceptance"),
        ("acceptance=1.5", "acceptance must be a number of 0 to 1, got 1.5"),
        ("acceptance=nan", "acceptance must be a number of 0 to 1, got nan"),
        ("acceptance=often", "acceptance must be a number of 0 to 1, got 'often'"),
        ("acceptance=0.8,draft=-0.1", "draft must be a number of 0 to 1, got -0.1"),
        ("acceptance=0.8,k=0", "k must be a whole number of 1 to 16, got 0"),
        ("acceptance=0.8,k=17", "k must be a whole number of 1 to 16, got 17"),
        ("acceptance=0.8,k=2.5", "k must be a whole number of 1 to 16, got 2.5"),
        ("acceptance=0.8,adapts=no", "adapts must be true or false, got 'no'"),
        ("acceptance=0.8,acceptance=0.7", "twice"),
        ("acceptance=0.8,k", "'k', which is no name=value"),
        ("aceptance=0.8", "no 'aceptance'; did you mean 'acceptance'?"),
        ("ngram,k=4", "'ngram', which is no name=value"),
    ],
)
def test_what_is_no_speculation_is_refused(text: str, said: str):
    with pytest.raises(ConfigError) as raised:
        parse_drafting(text, "--speculation")
    assert said in str(raised.value)
    assert str(raised.value).startswith("--speculation")
    assert "k=4,acceptance=0.8,draft=0.1" in str(raised.value)
