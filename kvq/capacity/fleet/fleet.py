"""Several replicas under one load: routed, split into prefill and decode, or spilling over to an API."""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from heapq import heappop, heappush
from math import inf

from kvq.capacity.fleet.call import Call
from kvq.capacity.fleet.faults import NONE, Faults
from kvq.capacity.fleet.histogram import Histogram
from kvq.capacity.fleet.records import Fate, Records
from kvq.capacity.fleet.replica import EngineSpec, Gauges, Replica
from kvq.capacity.fleet.routing import Router, Routing, make_router
from kvq.errors import ConfigError

Progress = Callable[[int], object]  # told how many requests have come
_OBJECTS = 100_000  # between two collections of the young


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetSpec:
    """How many engines of one kind, and what they do for each other."""

    engine: EngineSpec
    replicas: int = 1
    routing: Routing = Routing.LEAST_LOADED
    prefill_replicas: int = 0  # that compute prompts only; the others then go on from their KV
    transfer_token_s: float = 0.0  # to send a token's KV from one to the other
    overflow_waiting: int | None = None  # waiting requests from which on the next goes to an API
    faults: Faults = NONE

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.prefill_replicas < 0:
            raise ConfigError(
                f"a fleet needs a replica, got {self.replicas}, and {self.prefill_replicas} for prefill"
            )
        if self.transfer_token_s < 0 or (self.overflow_waiting is not None and self.overflow_waiting < 0):
            raise ConfigError("times of transfer and bounds of queues must be at least 0")

    @property
    def engines(self) -> int:
        """In all."""
        return self.replicas + self.prefill_replicas


@dataclass(kw_only=True, slots=True)
class Run:
    """What came of a load."""

    records: Records
    gauges: list[Gauges]  # of the replicas, those for prefill first
    seconds: float  # from the first arrival to the last end
    gaps: Histogram = field(default_factory=Histogram)  # between tokens, of all of them
    handovers: Histogram = field(default_factory=Histogram)  # of these, from one replica to another

    @property
    def digest(self) -> str:
        """16 hexadecimal digits over everything; equal for equal runs."""
        sha = sha256()
        records = self.records
        for times in (records.arrival_s, records.admitted_s, records.first_s, records.end_s):
            sha.update(times.tobytes())
        for counts in (records.cached_tokens, records.preemptions, records.fate, records.replica):
            sha.update(counts.tobytes())
        sha.update(repr([(g.steps, g.busy_s, g.live_s, g.gaps.items()) for g in self.gauges]).encode())
        return sha.hexdigest()[:16]


def serve(
    calls: Iterable[Call], spec: FleetSpec, *, leaps: bool = True, progress: Progress = lambda done: None
) -> Run:
    """Serve requests in order of arrival until all of them ended.

    `leaps=False` takes every step by itself: slower, with the same results.

    Raises:
        ConfigError: requests that are not in order of arrival.
    """
    fleet = _Split(spec, leaps) if spec.prefill_replicas else _Whole(spec, leaps)
    with _rare_collections():
        first = _serve(spec.faults.visit(calls), fleet, progress)
    gauges = [replica.gauges for replica in fleet.engines]
    gaps = Histogram()
    gaps.merge(fleet.handovers)
    for one in gauges:
        gaps.merge(one.gaps)
    ends = [time for time in fleet.records.end_s if time == time]
    return Run(
        records=fleet.records,
        gauges=gauges,
        seconds=max(ends, default=first) - first,
        gaps=gaps,
        handovers=fleet.handovers,
    )


def _serve(calls: Iterable[Call], fleet: "_Whole | _Split", progress: Progress) -> float:
    """All of them; returns when the first one came."""
    before = first = None
    for call in calls:
        if before is not None and call.arrival_s < before:
            raise ConfigError(f"request {call.number} arrives before the one ahead of it")
        first = call.arrival_s if first is None else first
        before = call.arrival_s
        fleet.take(call)
        progress(len(fleet.records))
    fleet.end()
    return first or 0.0


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Let the garbage collector look less often: it takes a tenth of the time, and finds little."""
    usual = gc.get_threshold()
    gc.set_threshold(_OBJECTS, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


class _Whole:
    """Replicas that do everything."""

    def __init__(self, spec: FleetSpec, leaps: bool) -> None:
        self.records = Records()
        self.engines = [
            Replica(i, spec.engine, self.records, leaps=leaps, faults=spec.faults)
            for i in range(spec.replicas)
        ]
        self._spec = spec
        self._router = make_router(spec.routing)
        chooses = spec.routing in (Routing.LEAST_LOADED, Routing.PREFIX) and spec.replicas > 1
        self._looks = chooses or spec.overflow_waiting is not None or spec.faults.life_s < inf
        self.handovers = Histogram()

    def take(self, call: Call) -> None:
        self.records.open(call)
        if self._looks:
            _advance(self.engines, call.arrival_s)
        _place(call, self._router, self.engines, self.records, self._spec.overflow_waiting)

    def end(self) -> None:
        _advance(self.engines, inf)


class _Split:
    """Replicas for prompts, whose KV goes to those for the answers."""

    def __init__(self, spec: FleetSpec, leaps: bool) -> None:
        self.records = Records()
        self._prompts = Records()  # of the first half: the same numbers
        self._answers = Records()
        self._spec = spec
        self._sent: list[tuple[float, int, Call]] = []  # heap of (when the KV is there, number, rest)
        self._rest: dict[int, Call] = {}
        first = [
            Replica(i, spec.engine, self._prompts, leaps=leaps, faults=spec.faults, on_served=self._hand_over)
            for i in range(spec.prefill_replicas)
        ]
        second = [
            Replica(i, _decoding(spec.engine), self._answers, leaps=leaps, faults=spec.faults)
            for i in range(spec.prefill_replicas, spec.engines)
        ]
        self._first, self._second = first, second
        self.engines = [*first, *second]
        self.handovers = Histogram()  # between the first token and the second
        self._to_prefill = make_router(Routing.LEAST_LOADED)
        self._to_decode = make_router(spec.routing)

    def take(self, call: Call) -> None:
        for records in (self.records, self._prompts, self._answers):
            records.open(call)
        _advance(self._first, call.arrival_s)
        self._deliver(call.arrival_s)
        self._rest[call.number] = call
        _place(
            replace(call, output_tokens=1, kept_tokens=None),
            self._to_prefill,
            self._first,
            self._prompts,
            self._spec.overflow_waiting,
        )
        if self._prompts.fate[call.number] != Fate.OPEN:
            del self._rest[call.number]

    def end(self) -> None:
        _advance(self._first, inf)
        self._deliver(inf)
        _advance(self._second, inf)
        for number in range(len(self.records)):
            self._join(number)

    def _hand_over(self, call: Call, now: float) -> None:
        """A prompt is computed, and its first token there."""
        whole = self._rest.pop(call.number)
        if whole.kept_tokens == 1:
            self._prompts.fate[call.number] = Fate.CANCELLED
        if whole.tokens_taken == 1:
            return
        there = now + self._spec.transfer_token_s * len(call.prompt)
        rest = replace(
            whole,
            arrival_s=there,
            prompt=call.prompt + call.answer(0, 1),
            output_tokens=whole.output_tokens - 1,
            kept_tokens=None if whole.kept_tokens is None else whole.kept_tokens - 1,
        )
        heappush(self._sent, (there, call.number, rest))

    def _deliver(self, until: float) -> None:
        """Pass on the KV that has arrived: nothing that comes later can be earlier."""
        while self._sent and self._sent[0][0] <= until:
            there, _, rest = heappop(self._sent)
            _advance(self._second, there)
            _place(rest, self._to_decode, self._second, self._answers, None)

    def _join(self, number: int) -> None:
        """One record of both halves."""
        whole, prompts, answers = self.records, self._prompts, self._answers
        for name in ("admitted_s", "first_s", "end_s", "cached_tokens", "preemptions", "fate", "replica"):
            getattr(whole, name)[number] = getattr(prompts, name)[number]
        if whole.fate[number] == Fate.SERVED and whole.output_tokens[number] > 1:
            for name in ("end_s", "fate", "replica"):
                getattr(whole, name)[number] = getattr(answers, name)[number]
            whole.preemptions[number] += answers.preemptions[number]
            if answers.fate[number] == Fate.SERVED:
                self.handovers.add(answers.first_s[number] - prompts.first_s[number])


def _advance(replicas: Sequence[Replica], until: float) -> None:
    for replica in replicas:
        replica.advance(until)


def _place(
    call: Call, router: Router, replicas: Sequence[Replica], records: Records, overflow_waiting: int | None
) -> None:
    """Send a request to a replica, or to an API where too many wait; it fails where no replica is ready."""
    now = call.arrival_s
    ready = [replica for replica in replicas if replica.ready_s <= now]
    waiting = min([replica.num_waiting for replica in ready], default=inf)
    if overflow_waiting is not None and waiting >= overflow_waiting:
        records.close(call.number, Fate.OVERFLOWED, now)
    elif not ready:
        records.close(call.number, Fate.FAILED, now)
    else:
        replica = router(call, ready)
        replica.advance(now)
        replica.add(call, now)


def _decoding(spec: EngineSpec) -> EngineSpec:
    """An engine that gets the KV of its prompts, which take no part of a step."""
    most = 1 << 24
    config = replace(spec.config, max_num_batched_tokens=most, min_chunk=most, prefix_caching=False)
    return replace(spec, computes_prompts=False, config=config)
