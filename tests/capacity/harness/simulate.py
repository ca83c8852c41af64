"""The engine's scheduler and block manager under a clock and a model that are made up."""

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import get_args

from kvq.engine.params import HintAction
from kvq.errors import OutOfBlocks
from kvq.scheduler import Request, Scheduler
from kvq.scheduler.request import RequestState
from tests.capacity.harness.fake_engine import FakeEngine
from tests.capacity.harness.fake_model import FakeModel, TokenSource
from tests.capacity.harness.faults import Faults, Injector
from tests.capacity.harness.invariants import check_empty
from tests.capacity.harness.records import SimulationResult
from tests.capacity.harness.setup import Setup
from tests.capacity.harness.workload import SimulatedRequest

_PIN_S = 1.0  # the longest time of a pin that is a fault
_MOST_PREEMPTIONS = 8  # of one request; a longer prompt would never get through otherwise


def simulate(  # D283: compares every token; `kvq simulate` is a fleet
    jobs: Iterable[SimulatedRequest],
    setup: Setup,
    *,
    faults: Faults | None = None,
    model: TokenSource | None = None,
    seed: int = 0,
    max_steps: int | None = None,
    check_every: int = 0,
) -> SimulationResult:
    """Serve jobs, in order of arrival, until all of them ended.

    The clock advances by what each step costs. From step `max_steps` on no more jobs are taken;
    those that are there go on to their end. `seed` decides which faults happen when. The block manager's own
    integrity check, which is slow, runs every `check_every` steps and at the end, by default only there.

    Raises:
        AssertionError: an invariant broke; the message names seed and step.
    """
    simulation = _Simulation(jobs, setup, faults, model, seed)
    try:
        simulation.run(max_steps, check_every)
    except Exception as error:
        step = len(simulation.result.gauges)
        raise AssertionError(f"seed {seed}, step {step}: {type(error).__name__}: {error}") from error
    return simulation.result


class _Simulation:
    def __init__(
        self,
        jobs: Iterable[SimulatedRequest],
        setup: Setup,
        faults: Faults | None,
        model: TokenSource | None,
        seed: int,
    ) -> None:
        self.result = SimulationResult(seed=seed)
        self._injector = Injector(faults, seed)
        self._engine = FakeEngine(
            setup, model or FakeModel(setup.pools, setup.config.max_num_seqs), self._injector, self.result
        )
        self._jobs = iter(jobs)
        self._next = next(self._jobs, None)
        self._leaving: list[tuple[float, int, Request]] = []  # heap of (when, number, who cancels)
        self._now = 0.0

    def run(self, max_steps: int | None, check_every: int) -> None:
        """Everything, to the end."""
        engine, gauges = self._engine, self.result.gauges
        while True:
            if len(gauges) == max_steps:
                self._next = None
            engine.now = self._now
            self._arrive()
            self._leave()
            if not (engine.scheduler.has_work or engine.scheduler.loading):
                if self._next is None:
                    break
                self._now = max(self._now, self._next.arrival_s)
                continue
            self._disturb()
            gauge = engine.step(self._now)
            gauges.append(gauge)
            self._now += gauge.seconds
            if check_every and len(gauges) % check_every == 0:
                engine.manager.check_integrity()
        check_empty(engine.scheduler)
        assert not engine.live, "requests never ended"
        self.result.seconds = self._now
        self.result.kept = engine.kept()
        self.result.digest = engine.trace.digest()

    def _arrive(self) -> None:
        while self._next is not None and self._next.arrival_s <= self._now:
            job, self._next = self._next, next(self._jobs, None)
            request = self._engine.add(job, self._now)
            if request is not None and job.patience_s is not None:
                heappush(self._leaving, (self._now + job.patience_s, len(self.result.records), request))

    def _leave(self) -> None:
        while self._leaving and self._leaving[0][0] <= self._now:
            _, _, request = heappop(self._leaving)
            if request in self._engine.live:
                self._engine.cancel(request, self._now)

    def _disturb(self) -> None:
        """What may happen between two steps."""
        engine, injector, faults = self._engine, self._injector, self._injector.faults
        engine.manager.expire(self._now)
        if injector.happens(faults.cancel):
            request = injector.one_of(injector.one_of(_kinds(engine.scheduler)) or [])
            if request is not None:
                engine.cancel(request, self._now)
        if injector.happens(faults.preemption) and engine.ahead is None:
            self._preempt(injector.one_of(list(engine.scheduler.running.requests)))
        if injector.happens(faults.host_corruption):
            injector.damage(engine.manager.blocks.tiers)
        if injector.happens(faults.pin):
            self._pin(injector.one_of(list(engine.live)))
        if injector.happens(faults.hint) and (known := injector.one_of(list(engine.sessions._sessions))):
            action = injector.one_of(get_args(HintAction))
            engine.sessions.hint(*known, action, injector.seconds(_PIN_S))
            engine.num_hints += 1

    def _preempt(self, request: Request | None) -> None:
        if request is None or request.preemptions >= _MOST_PREEMPTIONS:
            return
        self._engine.scheduler.preempt(request, self._now)

    def _pin(self, request: Request | None) -> None:
        if request is None:
            return
        manager = self._engine.manager
        tokens = request.branches[0].tokens
        prompt = manager.prompt(tokens, tenant=request.tenant, shared_salt=request.shared_salt)
        try:
            manager.pin(prompt, self._now + self._injector.seconds(_PIN_S))
        except OutOfBlocks:
            return


def _kinds(scheduler: Scheduler) -> list[list[Request]]:
    """The requests by what they wait for, so that rare kinds are hit as often as others."""
    lines = scheduler.waiting
    aside = [r for r in lines.requests() if r.state is RequestState.WAITING and r not in lines.queue]
    kinds = [list(scheduler.running.requests), lines.preempted, aside, list(lines.queue)]
    return [kind for kind in kinds if kind]
