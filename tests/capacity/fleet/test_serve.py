"""Simulated fleets: leaps change nothing, requests are accounted for, policies do what they say."""

import itertools
from array import array

import pytest

from kvq.capacity.fleet.arrivals import Call
from kvq.capacity.fleet.fleet import FleetSpec, serve
from kvq.capacity.fleet.records import Fate
from kvq.capacity.fleet.replica import Replica
from kvq.capacity.fleet.routing import Routing
from kvq.errors import ConfigError
from tests.capacity.fleet.kit import drawn, engine, load


@pytest.mark.parametrize("runs", [300, pytest.param(1000, marks=pytest.mark.long)])
def test_many_steps_at_once_are_as_each_by_itself(runs: int):
    seen = {"leapt": 0, "preempted": 0, "reused": 0, "refused": 0, "overflowed": 0, "split": 0}
    for seed in range(runs):
        fleet, arrivals = drawn(seed)
        calls = list(arrivals.calls(12, seed))
        one, other = (serve(calls, fleet, leaps=leaps) for leaps in (True, False))
        assert one.digest == other.digest, f"seed {seed}"
        assert Fate.OPEN not in list(one.records.fate), f"seed {seed}"
        seen["leapt"] += fleet.engine.can_leap
        seen["preempted"] += sum(one.records.preemptions) > 0
        seen["reused"] += sum(one.records.cached_tokens) > 0
        seen["refused"] += Fate.REFUSED in list(one.records.fate)
        seen["overflowed"] += Fate.OVERFLOWED in list(one.records.fate)
        seen["split"] += fleet.prefill_replicas > 0
    assert min(seen.values()) >= runs / 50, seen


def test_leaps_are_taken(monkeypatch: pytest.MonkeyPatch):
    steps = itertools.count()
    plain = Replica._step
    monkeypatch.setattr(Replica, "_step", lambda self: (next(steps), plain(self)))
    run = serve(load(1.0).calls(100, 0), FleetSpec(engine=engine()))
    assert next(steps) < run.gauges[0].steps / 4


def test_equal_seeds_give_equal_runs_and_others_do_not():
    fleet, arrivals = drawn(1)
    digests = [serve(arrivals.calls(50, seed), fleet).digest for seed in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2]


def call(number: int, arrival_s: float, prompt: int = 32, output: int = 10, **more: object) -> Call:
    return Call(
        number=number,
        arrival_s=arrival_s,
        prompt=array("I", range(number * 1000, number * 1000 + prompt)),
        output_tokens=output,
        **more,
    )


def test_a_request_alone_takes_what_its_steps_take():
    spec = engine()
    run = serve([call(0, 2.0, prompt=32, output=3)], FleetSpec(engine=spec))
    time = spec.time
    prefill = time.linear_s(32) + 1e-8 * 32 * 33 / 2 + 1e-5
    decodes = [5e-3 + 1e-6 * seen + 1e-5 for seen in (33, 34)]
    assert run.records.first_s[0] == pytest.approx(2.0 + prefill)
    assert run.records.end_s[0] == pytest.approx(2.0 + prefill + sum(decodes))
    assert run.seconds == pytest.approx(prefill + sum(decodes))
    assert run.gauges[0].busy_s == pytest.approx(run.seconds)


def test_what_can_never_fit_is_refused_and_the_others_are_served():
    calls = [call(0, 0.0), call(1, 0.1, prompt=3000), call(2, 0.2)]
    run = serve(calls, FleetSpec(engine=engine(num_blocks=50)))
    assert list(run.records.fate) == [Fate.SERVED, Fate.REFUSED, Fate.SERVED]


def test_calls_out_of_order_are_an_error():
    with pytest.raises(ConfigError, match="arrives before"):
        serve([call(0, 1.0), call(1, 0.5)], FleetSpec(engine=engine()))


def test_overflow_goes_elsewhere_and_nobody_else_waits_longer():
    calls = [call(i, 0.001 * i, output=50) for i in range(100)]
    spec = engine(max_num_seqs=4)
    spilling = serve(calls, FleetSpec(engine=spec, overflow_waiting=4))
    assert 50 < list(spilling.records.fate).count(Fate.OVERFLOWED) < 100
    assert spilling.gauges[0].peak_waiting <= 4
    assert spilling.seconds < serve(calls, FleetSpec(engine=spec)).seconds / 2


def test_twice_the_replicas_serve_an_overload_in_half_the_time():
    calls = [call(i, 0.0, output=50) for i in range(200)]
    one, two = (serve(calls, FleetSpec(engine=engine(), replicas=n)).seconds for n in (1, 2))
    assert two == pytest.approx(one / 2, rel=0.1)


@pytest.mark.parametrize("routing", [Routing.SESSION, Routing.PREFIX])
def test_conversations_find_their_prefixes_where_they_were(routing: Routing):
    talks = load(2.0, turns=5, think_s=3.0)
    spec = engine(num_blocks=2000)

    def reused(routing: Routing) -> int:
        run = serve(talks.calls(200, 0), FleetSpec(engine=spec, replicas=4, routing=routing))
        return sum(run.records.cached_tokens)

    assert reused(routing) > 2 * reused(Routing.ROUND_ROBIN)


def test_round_robin_takes_turns():
    calls = [call(i, 0.1 * i) for i in range(9)]
    run = serve(calls, FleetSpec(engine=engine(), replicas=3, routing=Routing.ROUND_ROBIN))
    assert list(run.records.replica) == [0, 1, 2] * 3


def test_prompts_computed_elsewhere_leave_streams_alone():
    """A long prompt beside streams slows them down; on a replica of its own it does not."""
    streams = [call(i, 0.0, prompt=16, output=200) for i in range(4)]
    prompts = [call(4 + i, 0.2 + 0.1 * i, prompt=1000, output=1) for i in range(5)]
    whole = serve([*streams, *prompts], FleetSpec(engine=engine(), replicas=2))
    split = serve(
        [*streams, *prompts],
        FleetSpec(engine=engine(), replicas=1, prefill_replicas=1, transfer_token_s=1e-4),
    )
    assert all(fate == Fate.SERVED for fate in split.records.fate)
    worst = [max(run.records.itl_s(i) for i in range(4)) for run in (whole, split)]
    assert worst[1] < worst[0]
    first = split.records.first_s[0]
    assert split.gaps.percentile(99.9) is not None
    assert split.records.end_s[0] > first


def test_the_kv_that_is_sent_takes_its_time():
    def e2e(token_s: float) -> float:
        spec = FleetSpec(engine=engine(), prefill_replicas=1, transfer_token_s=token_s)
        return serve([call(0, 0.0, prompt=100, output=2)], spec).seconds

    assert e2e(0.01) - e2e(0.0) == pytest.approx(1.0)
