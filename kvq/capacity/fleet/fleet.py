"""Simulated fleet of replicas with routing, split prefill and decode, or overflow to an external API.

This module also searches for the number of replicas that a load requires.
"""

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf
from typing import Any

from kvq.capacity.fleet.arrivals import Call
from kvq.capacity.fleet.faults import NONE, Faults
from kvq.capacity.fleet.records import Fate, FleetRun, Records
from kvq.capacity.fleet.replica import EngineSpec, Replica
from kvq.capacity.fleet.routing import Router, Routing, make_router
from kvq.errors import ConfigError

# All requests, or a function that yields each when it is due, given the records and `_Fleet.step`
Load = Iterable[Call] | Callable[[Records, Callable[[float], bool]], Iterator[Call]]
Progress = Callable[[int], object]  # receives the number of requests that have arrived
_OBJECTS = 100_000  # objects allocated between collections of the young generation


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetSpec:
    """Number of identical engines, and how the load is shared among them."""

    engine: EngineSpec
    replicas: int = 1
    routing: Routing = Routing.LEAST_LOADED
    prefill_replicas: int = 0  # these compute only prompts; the other replicas continue from the KV
    transfer_token_s: float = 0.0  # time to send the KV of one token to a decode replica
    overflow_waiting: int | None = None  # number of waiting requests at which the next goes to an API
    faults: Faults = NONE
    seed: int = 0  # for routers that choose at random

    @property
    def engines(self) -> int:
        """Total number of engines."""
        return self.replicas + self.prefill_replicas


def serve(
    calls: Load, spec: FleetSpec, *, leaps: bool = True, progress: Progress = lambda done: None
) -> FleetRun:
    """Serve requests in order of arrival until all of them have finished.

    `leaps=False` simulates every step separately: slower, but with the same results.

    Raises:
        ConfigError: the requests are not in order of arrival.
    """
    fleet = _Fleet(spec, leaps)
    records = fleet.records
    if callable(calls):
        calls = calls(records, fleet.step)
    with _rare_collections():
        for call in spec.faults.visit(calls):
            if records and call.arrival_s < records.arrival_s[-1]:
                raise ConfigError(f"request {call.number} arrives before the one ahead of it")
            fleet.take(call)
            progress(len(records))
        fleet.end()
    gauges = [replica.gauges for replica in fleet.engines]
    seconds = max(records.end_s) - records.arrival_s[0] if records else 0.0
    return FleetRun(records=records, gauges=gauges, seconds=seconds)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Run the garbage collector less often, since it would take a tenth of the time and free little."""
    usual = gc.get_threshold()
    gc.set_threshold(_OBJECTS, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


class _Fleet:
    """Replicas that do everything, or prefill replicas that send their KV to decode replicas."""

    def __init__(self, spec: FleetSpec, leaps: bool) -> None:
        self.records = Records()
        kinds = [spec.engine] * spec.prefill_replicas
        kinds += [_decoding(spec.engine) if kinds else spec.engine] * spec.replicas
        self.engines = [
            Replica(i, kind, self.records, leaps=leaps, faults=spec.faults, hand_over=self._hand_over)
            for i, kind in enumerate(kinds)
        ]
        self._prefill = self.engines[: spec.prefill_replicas]
        self._rest = self.engines[spec.prefill_replicas :]
        self._sent: list[tuple[float, int, Call]] = []  # heap of (arrival of the KV, number, rest)
        self._spec = spec
        self._to_prefill = make_router(Routing.LEAST_LOADED)
        self._route = make_router(spec.routing, spec.seed)
        chooses = spec.routing.goes_by_load and spec.replicas > 1
        self._looks = chooses or spec.overflow_waiting is not None or spec.faults.life_s < inf

    def take(self, call: Call) -> None:
        """Accept an arriving request."""
        self.records.open(call)
        most = self._spec.overflow_waiting
        if self._prefill:
            _advance(self._prefill, call.arrival_s)
            self._deliver(call.arrival_s)
            kept = 1 if call.kept_tokens == 1 else None
            first = replace(call, output_tokens=1, kept_tokens=kept, whole=call)
            self._place(first, self._to_prefill, self._prefill, most)
            return
        if self._looks:
            _advance(self._rest, call.arrival_s)
        self._place(call, self._route, self._rest, most)

    def step(self, until: float) -> bool:
        """Run the next step of any engine if it begins before `until`. Return False if there is none."""
        busy = sorted([engine for engine in self.engines if engine.live], key=lambda engine: engine.now)
        if not busy or busy[0].now >= until:
            return False
        others = [other.now for other in busy if other.now > busy[0].now]
        busy[0].advance(min([until, *others]), once=True)
        return True

    def end(self) -> None:
        """Serve the remaining requests; no more will arrive."""
        _advance(self._prefill, inf)
        self._deliver(inf)
        _advance(self._rest, inf)

    def _hand_over(self, call: Call, now: float) -> bool:
        """Send a prompt's KV and first token to a decode replica; return False if no tokens remain."""
        whole = call.whole
        if whole is None or whole.output_tokens == 1:
            return False
        there = now + self._spec.transfer_token_s * len(call.prompt)
        rest = replace(
            whole,
            arrival_s=there,
            prompt=call.prompt + call.answer(0, 1),
            output_tokens=whole.output_tokens - 1,
            kept_tokens=None if whole.kept_tokens is None else whole.kept_tokens - 1,
        )
        heappush(self._sent, (there, call.number, rest))
        return True

    def _deliver(self, until: float) -> None:
        """Pass KV that arrives by `until` to replicas. KV sent later can't arrive earlier."""
        while self._sent and self._sent[0][0] <= until:
            there, _, rest = heappop(self._sent)
            _advance(self._rest, there)
            self._place(rest, self._route, self._rest, None)

    def _place(
        self, call: Call, router: Router, replicas: Sequence[Replica], overflow_waiting: int | None
    ) -> None:
        """Send a request to a replica, or to an API if too many wait; fail it if no replica is ready."""
        now = call.arrival_s
        ready = [replica for replica in replicas if replica.ready_s <= now]
        waiting = min([replica.num_waiting for replica in ready], default=inf)
        if overflow_waiting is not None and waiting >= overflow_waiting:
            self.records.close(call.number, Fate.OVERFLOWED, now)
        elif not ready:
            self.records.close(call.number, Fate.FAILED, now)
        else:
            replica = router(call, ready)
            replica.advance(now)
            replica.add(call, now)


def _advance(replicas: Sequence[Replica], until: float) -> None:
    for replica in replicas:
        replica.advance(until)


def _decoding(spec: EngineSpec) -> EngineSpec:
    """Return the engine spec of a decode replica: prompts arrive with their KV and cost no step time."""
    most = 1 << 24
    config = replace(spec.config, max_num_batched_tokens=most, min_chunk=most, prefix_caching=False)
    return replace(spec, computes_prompts=False, config=config)


MOST_REPLICAS = 1024
_IDLE = 0.5  # utilization below which more replicas don't shorten waiting


def fewest_replicas(run: Callable[[int], dict[str, Any]], share: float) -> tuple[int, dict[str, Any]]:
    """Return the smallest number of replicas with which `share` of the requests meet the SLO, and its
    figures.

    `run` serves the load with the number of replicas passed to it. The search doubles the number, then
    bisects, assuming that more replicas are never worse.

    Raises:
        ConfigError: `MOST_REPLICAS` replicas are not enough, or adding replicas no longer helps.
    """
    tried: dict[int, dict[str, Any]] = {}

    def met(number: int) -> float:
        if number not in tried:
            tried[number] = run(number)
        return tried[number]["slo_met"] or 0.0

    def enough(number: int) -> bool:
        return met(number) >= share

    high = 1
    while not enough(high):
        is_idle = tried[high]["utilization"] < _IDLE
        is_hopeless = high > 1 and is_idle and met(high) <= met(high // 2)
        if high >= MOST_REPLICAS or is_hopeless:
            raise ConfigError(
                f"{high} replicas keep the SLO for {100 * met(high):.1f}% of the requests, "
                f"{100 * share:g}% are asked for, and more don't help; loosen the SLO, or use a faster GPU"
            )
        high = min(MOST_REPLICAS, 2 * high)
    between = range(high // 2 + 1, high)
    found = (*between, high)[bisect_left(between, True, key=enough)]
    return found, tried[found]
