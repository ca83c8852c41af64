"""Fleet of replicas under one load: routed, split into prefill and decode, or overflowing to an API.

And how many of them a load needs.
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
from kvq.capacity.fleet.records import Fate, FleetRun, Histogram, Records
from kvq.capacity.fleet.replica import EngineSpec, Replica
from kvq.capacity.fleet.routing import Router, Routing, make_router
from kvq.errors import ConfigError

Progress = Callable[[int], object]  # told how many requests have come
_OBJECTS = 100_000  # between two collections of the young


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetSpec:
    """Number of engines of one kind, and how they work together."""

    engine: EngineSpec
    replicas: int = 1
    routing: Routing = Routing.LEAST_LOADED
    prefill_replicas: int = 0  # that compute prompts only; the others then go on from their KV
    transfer_token_s: float = 0.0  # to send a token's KV from one to the other
    overflow_waiting: int | None = None  # waiting requests from which on the next goes to an API
    faults: Faults = NONE
    seed: int = 0  # of routers that choose at random

    @property
    def engines(self) -> int:
        """Engines in total."""
        return self.replicas + self.prefill_replicas


def serve(
    calls: Iterable[Call], spec: FleetSpec, *, leaps: bool = True, progress: Progress = lambda done: None
) -> FleetRun:
    """Serve requests in order of arrival until all of them ended.

    `leaps=False` takes every step by itself: slower, with the same results.

    Raises:
        ConfigError: requests that are not in order of arrival.
    """
    fleet = _Fleet(spec, leaps)
    records = fleet.records
    with _rare_collections():
        for call in spec.faults.visit(calls):
            if records and call.arrival_s < records.arrival_s[-1]:
                raise ConfigError(f"request {call.number} arrives before the one ahead of it")
            fleet.take(call)
            progress(len(records))
        fleet.end()
    gauges = [replica.gauges for replica in fleet.engines]
    gaps = Histogram()
    for one in (records.handovers, *(gauge.gaps for gauge in gauges)):
        gaps.merge(one)
    seconds = max(records.end_s) - records.arrival_s[0] if records else 0.0
    return FleetRun(records=records, gauges=gauges, seconds=seconds, gaps=gaps)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Run the garbage collector less often: it takes a tenth of the time, and finds little."""
    usual = gc.get_threshold()
    gc.set_threshold(_OBJECTS, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


class _Fleet:
    """Replicas that do everything; or some for prompts, whose KV goes to the others for the answers."""

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
        self._sent: list[tuple[float, int, Call]] = []  # heap of (when the KV is there, number, rest)
        self._spec = spec
        self._to_prefill = make_router(Routing.LEAST_LOADED)
        self._route = make_router(spec.routing, spec.seed)
        chooses = spec.routing.goes_by_load and spec.replicas > 1
        self._looks = chooses or spec.overflow_waiting is not None or spec.faults.life_s < inf

    def take(self, call: Call) -> None:
        """Take a request that arrives now."""
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

    def end(self) -> None:
        """Serve what is left: no more requests will arrive."""
        _advance(self._prefill, inf)
        self._deliver(inf)
        _advance(self._rest, inf)

    def _hand_over(self, call: Call, now: float) -> bool:
        """Pass a computed prompt with its first token on; False if there are no further tokens."""
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
        """Pass on the KV that has arrived by then. Nothing later can arrive earlier."""
        while self._sent and self._sent[0][0] <= until:
            there, _, rest = heappop(self._sent)
            _advance(self._rest, there)
            self._place(rest, self._route, self._rest, None)

    def _place(
        self, call: Call, router: Router, replicas: Sequence[Replica], overflow_waiting: int | None
    ) -> None:
        """Send a request to a replica, or to an API where too many wait; it fails where none is ready."""
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
    """Return the engine of a decode replica: prompts come with their KV and take no part of a step."""
    most = 1 << 24
    config = replace(spec.config, max_num_batched_tokens=most, min_chunk=most, prefix_caching=False)
    return replace(spec, computes_prompts=False, config=config)


MOST_REPLICAS = 1024
_IDLE = 0.5  # utilization below which more replicas don't shorten waiting


def fewest_replicas(run: Callable[[int], dict[str, Any]], share: float) -> tuple[int, dict[str, Any]]:
    """Return the fewest replicas with which that share of the requests keeps the SLO, and their figures.

    `run` serves the load with a number of replicas. They are doubled, then bisected: more
    replicas are taken to be no worse.

    Raises:
        ConfigError: not even `MOST_REPLICAS` do, or no request can be served at all.
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
