"""Fleets under faults: everybody ends once, nothing stays behind, and the seed decides it all."""

from collections import Counter
from dataclasses import replace
from math import inf

import pytest

from kvq.capacity.fleet.faults import Faults
from kvq.capacity.fleet.fleet import FleetRun, FleetSpec, serve
from kvq.capacity.fleet.records import Fate, Records, summarize
from kvq.capacity.fleet.replica import Replica
from tests.capacity.fleet.kit import drawn, engine, load

CALM = Faults(seed=5, leaving=0.0, slow_steps=0.0, life_s=inf)
OFTEN = Faults(seed=5, leaving=0.3, slow_steps=0.02, life_s=3.0, restart_s=0.5)


def run(faults: Faults, *, rate: float = 10.0, requests: int = 200, **fleet: object) -> FleetRun:
    return serve(load(rate).calls(requests, 0), FleetSpec(engine=engine(), faults=faults, **fleet))


def figures(faults: Faults, **more: object) -> dict:
    return summarize(run(faults, **more), ttft_slo_s=1.0)


def test_faults_that_never_happen_change_nothing():
    for seed in range(20):
        fleet, arrivals = drawn(seed)
        calls = list(arrivals.calls(12, seed))
        assert serve(calls, replace(fleet, faults=CALM)).digest == serve(calls, fleet).digest


@pytest.mark.parametrize("prefill_replicas", [0, 1])
def test_the_seed_decides_when_what_goes_wrong(prefill_replicas: int):
    seeds = (5, 5, 6)
    digests = [run(replace(OFTEN, seed=s), prefill_replicas=prefill_replicas).digest for s in seeds]
    assert digests[0] == digests[1] != digests[2]


def test_many_steps_at_once_are_as_each_by_itself_and_everybody_ends_once(monkeypatch: pytest.MonkeyPatch):
    closed, replicas, seen = Counter(), [], Counter()
    close, begin = Records.close, Replica.__init__

    def closing(self: Records, number: int, fate: Fate, now: float) -> None:
        closed[id(self), number] += 1
        close(self, number, fate, now)

    def beginning(self: Replica, *arguments: object, **options: object) -> None:
        replicas.append(self)
        begin(self, *arguments, **options)

    monkeypatch.setattr(Records, "close", closing)
    monkeypatch.setattr(Replica, "__init__", beginning)
    for seed in range(200):
        fleet, arrivals = drawn(seed)
        faults = Faults(seed=seed, leaving=0.3, slow_steps=0.05, life_s=0.5, restart_s=0.1)
        calls = list(arrivals.calls(12, seed))
        one, other = (serve(calls, replace(fleet, faults=faults), leaps=leaps) for leaps in (True, False))
        assert one.digest == other.digest, f"seed {seed}"
        assert Fate.OPEN not in list(one.records.fate), f"seed {seed}"
        assert set(closed.values()) == {1}, f"seed {seed}"
        for replica in replicas:
            assert not replica.live
            assert not replica.scheduler.has_work
            assert not replica.manager.sequences()
            assert not any(pool.num_live for pool in replica.manager.pools)
            replica.manager.check_integrity()
        seen.update(Fate(fate).name for fate in set(one.records.fate))
        seen["slow"] += sum(gauge.slow_steps for gauge in one.gauges) > 0
        seen["restarted"] += sum(gauge.restarts for gauge in one.gauges) > 0
        closed.clear()
        replicas.clear()
    assert min(seen[name] for name in ("SERVED", "FAILED", "CANCELLED", "slow", "restarted")) > 20, seen


def test_clients_that_leave_are_neither_served_nor_missed():
    found = figures(replace(CALM, leaving=0.3))
    assert found["cancelled"] + found["served"] == found["requests"]
    assert 0.2 < found["cancelled"] / found["requests"] < 0.4
    assert found["slo_met"] == 1.0
    assert found["failed"] == found["restarts"] == found["slow_steps"] == 0
    assert found["output_tokens_per_s"] < figures(CALM)["output_tokens_per_s"]


def test_slow_steps_are_felt_by_all_who_wait_for_them():
    calm, slow = figures(CALM), figures(replace(CALM, slow_steps=0.01))
    assert slow["slow_steps"] > 5
    assert slow["served"] == calm["served"] == 200
    assert slow["itl_ms_p50"] == pytest.approx(calm["itl_ms_p50"], rel=0.3)
    assert slow["ttft_ms_p99"] > 3 * calm["ttft_ms_p99"]


def test_what_a_dead_engine_held_fails_and_the_next_one_serves():
    found = figures(replace(CALM, life_s=5.0, restart_s=0.2))
    assert found["restarts"] > 0
    assert 0 < found["failed"] < found["served"]
    assert found["failed"] + found["served"] == found["requests"]
    assert found["slo_met"] == pytest.approx(found["served"] / 200)
    more = figures(replace(CALM, life_s=5.0, restart_s=2.0))
    assert more["failed"] > found["failed"]  # those that come while nobody is ready fail too


def test_others_take_over_or_an_api():
    dying = replace(CALM, life_s=5.0, restart_s=2.0)
    alone, two, spilling = figures(dying), figures(dying, replicas=3), figures(dying, overflow_waiting=50)
    assert two["failed"] < alone["failed"] / 2
    assert spilling["overflowed"] > 0
    assert spilling["failed"] < alone["failed"]
