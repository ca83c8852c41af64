"""What the engine does with plans, over a fake model: take tokens, branch, end, keep records."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from kvq.blockmgr import Demote, Fill
from kvq.blockmgr.packed.ladder import Pack, Packed
from kvq.engine.requests.sessions import Sessions
from kvq.errors import KVQError, RequestError
from kvq.scheduler import Branch, Request, Scheduler, StepPlan
from kvq.scheduler.request import RequestState
from tests.capacity.harness.alone import check_tokens
from tests.capacity.harness.answers import beam_picks, choose
from tests.capacity.harness.fake_model import TokenSource
from tests.capacity.harness.faults import Injector
from tests.capacity.harness.invariants import Progress, check_known, check_plan
from tests.capacity.harness.records import Gauge, Outcome, RequestRecord, SimulationResult
from tests.capacity.harness.setup import Setup
from tests.capacity.harness.trace import Trace
from tests.capacity.harness.workload import SimulatedRequest

_IDLE_S = 1e-3  # until the next attempt when nothing can run


@dataclass(frozen=True, slots=True)
class Ran:
    """A step that ran and was not concluded."""

    plan: StepPlan
    keys: list[list[int]]  # per branch, of its last token and of its drafts
    bad: set[int]
    seconds: float


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request that has not ended."""

    job: SimulatedRequest
    request: Request
    record: RequestRecord
    keys: dict[Branch, int]  # by which its branches go on, once all are there


class FakeEngine:
    """One scheduler, its requests and their records."""

    def __init__(
        self, setup: Setup, model: TokenSource, injector: Injector, result: SimulationResult
    ) -> None:
        self.manager = setup.pools.manager(injector.manager)
        self.scheduler = Scheduler(self.manager, setup.config, setup.estimates or setup.costs)
        self.live: dict[Request, Ticket] = {}
        self.result = result
        self.trace = Trace()
        self.now = 0.0
        self.sessions = Sessions(self.scheduler, lambda: self.now)
        self._setup = setup
        self._model, model.tiers = model, self.manager.blocks.tiers
        self._injector = injector
        self._progress = Progress(setup.config.aging_s)
        self._filled: Counter[str] = Counter()  # blocks, by what they were filled from
        self.num_hints = 0
        self.ahead: Ran | None = None  # a step that was planned before the last one's tokens were known

    def add(self, job: SimulatedRequest, now: float) -> Request | None:
        """Take a request in, or refuse it."""
        records = self.result.records
        record = RequestRecord(
            number=len(records), arrival_s=now, tenant=job.tenant, prompt_tokens=len(job.prompt)
        )
        records.append(record)
        request = job.request(record.number)
        try:
            self.scheduler.add(request, now)
        except RequestError as error:
            record.outcome, record.end_s, record.reason = Outcome.REFUSED, now, str(error)
            self.trace.end(now, record.number, Outcome.REFUSED)
            return None
        self.live[request] = Ticket(job, request, record, {})
        self.sessions.begin(request)
        self._progress.arrived(request, len(self.result.gauges), now)
        return request

    def cancel(self, request: Request, now: float) -> None:
        """End a request for its user."""
        self.scheduler.end(request)
        self._end(request, Outcome.CANCELLED, now)

    def kept(self) -> dict[str, int]:
        """Totals of what was kept beyond the pools, and came back."""
        ladder, loading, tiers = self.manager.blocks.ladder, self.scheduler.loading, self.manager.blocks.tiers
        return {
            "packed_blocks": ladder.num_packed,
            "loaded_tokens": loading.loaded_tokens,
            "failed_loads": loading.num_failed,
            "damaged_blocks": 0 if tiers is None else tiers.num_damaged,
            "prefetched": self.sessions.num_prefetched,
            "filled_from_pool": self._filled["pool"],
            "filled_in_cold_form": self._filled["cold"],
            "filled_in_own_form": self._filled["own"],
            "hints": self.num_hints,
        }

    def step(self, now: float) -> Gauge:
        """One step; what was generated in it is there when it is over."""
        self.sessions.prefetch_due()
        ran = self.ahead or self._next(now)
        if ran is None:
            return self._gauge(now, _IDLE_S, 0, 0)
        self.ahead = self._run_ahead(ran) if self._setup.plans_ahead else None
        self._conclude(ran.plan, ran.keys, ran.bad, now + ran.seconds)
        if self.ahead is None:
            check_known(self.scheduler)
        return self._gauge(now, ran.seconds, ran.plan.num_decodes, ran.plan.prefill_tokens)

    def _next(self, now: float) -> Ran | None:
        """Plan a step and run it; None if nothing can run."""
        refusals = self._injector.refusals
        for branch in self.scheduler.running.active:
            if branch.request.num_branches == 1 or not self.live[branch.request].job.is_beam_search:
                branch.num_drafts = self._injector.num_drafts(self._setup.most_drafts)
        plan = self.scheduler.schedule(now)
        for request in self.scheduler.take_failed():
            has_cause = self._injector.refusals > refusals
            assert has_cause, f"request {request.id} was given up although it fits: {request.error}"
            self._end(request, Outcome.FAILED, now)
        self._progress.stepped(plan)
        if plan is None:
            self.trace.step(now, None, [])
            return None
        return self._run(plan)

    def _run_ahead(self, ran: Ran) -> Ran | None:
        """Run the step after one whose tokens nobody has seen yet, if it can be planned."""
        if any(self._branches(branch.request) for branch in ran.plan.branches if not branch.is_done):
            return None
        plan = self.scheduler.schedule_ahead(ran.plan)
        if plan is None:
            return None
        assert plan.follows is not None
        plan.token_ids[:] = [choose(ran.keys[i][-1]) for i in plan.follows]
        self._progress.stepped(plan)
        return self._run(plan, {i for i, before in enumerate(plan.follows) if before in ran.bad})

    def _run(self, plan: StepPlan, doomed: Collection[int] = ()) -> Ran:
        """`doomed`: branches that read what is not finite."""
        check_plan(self.scheduler, plan)
        bad = self._injector.bad(plan).union(doomed)
        share = self._setup.guessed_right
        keys = self._model.run(plan, bad, lambda token: self._injector.guess(token, share))
        seconds = self._measure(plan, plan.prefill_tokens) * self._injector.slowness()
        return Ran(plan, keys, bad, seconds)

    def _measure(self, plan: StepPlan, prefill_tokens: int) -> float:
        first = plan.num_decodes
        depth = plan.ends[first] - plan.counts[first] if prefill_tokens else 0
        self._filled.update(_source(order) for order in plan.orders if isinstance(order, Fill))
        moved = sum(isinstance(order, Demote | Fill | Pack) for order in plan.orders)
        seconds = self._setup.seconds(
            num_decodes=first, prefill_tokens=prefill_tokens, depth=depth, moved=moved
        )
        if self._setup.estimates is not None:
            self._setup.estimates.observe(
                num_decodes=first, prefill_tokens=prefill_tokens, depth=depth, seconds=seconds
            )
        return seconds

    def _conclude(self, plan: StepPlan, keys: list[list[int]], bad: set[int], now: float) -> None:
        self.trace.step(now, plan, keys)
        tokens: list[list[int]] = [
            self._tokens(plan, i, keys[i])
            if sampled and not branch.is_done and not self._branches(branch.request)
            else []
            for i, (branch, sampled) in enumerate(zip(plan.branches, plan.samples, strict=True))
        ]
        self.scheduler.commit(plan, tokens, bad=bad)
        for i in bad:
            request = plan.branches[i].request
            if plan.branches[i].is_done:  # it ended while the step ran, which computed it in vain
                continue
            self.scheduler.fail(request, KVQError("values are not finite"))
            self._end(request, Outcome.FAILED, now)
        branching: dict[Request, Ticket] = {}
        for i, branch in enumerate(plan.branches):
            ticket = self.live.get(branch.request)
            if ticket is None or branch.is_done:  # it ended in this step, or while it ran
                continue
            self._admit(ticket)
            if tokens[i]:
                self._take(ticket, branch, tokens[i], now)
            elif plan.samples[i]:
                ticket.keys[branch] = keys[i][-1]
                branching[branch.request] = ticket
        for ticket in branching.values():
            self._branch(ticket, now)

    def _branches(self, request: Request) -> bool:
        """True if new branches follow when a request's tokens are computed, instead of one token."""
        if request.num_branches == 1:
            return False
        return not request.is_forked or self.live[request].job.is_beam_search

    def _admit(self, ticket: Ticket) -> None:
        if ticket.record.admitted_s is None:
            ticket.record.admitted_s = ticket.request.admitted_s
            self._progress.admitted(ticket.request, len(self.result.gauges))

    def _branch(self, ticket: Ticket, now: float) -> None:
        """Choose a request's next branches, when all of those that it has were computed."""
        request = ticket.request
        if not request.is_forked:
            key = ticket.keys[request.branches[0]]
            picks = [(0, choose(key, i)) for i in range(request.num_branches)]
        elif all(map(_is_computed, request.branches)):
            picks = beam_picks([ticket.keys[branch] for branch in request.branches])
        else:
            return
        self.scheduler.branch_out(request, picks)
        for other, (_, token) in zip(request.branches, picks, strict=True):
            if other.is_done:  # only the whole beam search ends, with its first branch
                return
            self._take(ticket, other, [token], now)

    def _tokens(self, plan: StepPlan, index: int, keys: list[int]) -> list[int]:
        """A branch's accepted drafts and the token after them, none behind its last one."""
        drafts, end = plan.drafts[index], sum(plan.counts[: index + 1])
        guessed, job = plan.token_ids[end - drafts : end], self.live[plan.branches[index].request].job
        tokens: list[int] = []
        for key, guess in zip(keys, [*guessed, None], strict=True):
            tokens.append(choose(key))
            if tokens[-1] != guess or tokens[-1] == job.end_token:
                break
        return tokens

    def _take(self, ticket: Ticket, branch: Branch, tokens: list[int], now: float) -> None:
        """A branch has more tokens; the last one may be its last."""
        request, record, job = ticket.request, ticket.record, ticket.job
        record.tokens += len(tokens)
        if branch is request.branches[0]:
            if record.first_token_s is None:
                record.first_token_s = now
            elif record.last_token_s is not None:
                self.result.gaps_s.append(now - record.last_token_s)
            record.last_token_s = now
        if tokens[-1] != job.end_token and branch.num_generated != request.max_tokens:
            return
        if job.is_beam_search:
            self.scheduler.end(request)
        else:
            self.scheduler.finish(branch)
        if request.state is RequestState.ENDED:
            self._end(request, Outcome.FINISHED, now)

    def _end(self, request: Request, outcome: Outcome, now: float) -> None:
        ticket = self.live.pop(request, None)
        assert ticket is not None, f"request {request.id} ended twice"
        assert request.state is RequestState.ENDED, (
            f"request {request.id} is {request.state.value} at its end"
        )
        record = ticket.record
        record.outcome, record.end_s = outcome, now
        record.admitted_s = request.admitted_s
        record.preemptions, record.cached_tokens = request.preemptions, request.cached_tokens
        record.recomputed_tokens = request.usage.recomputed
        record.reason = "" if request.error is None else str(request.error)
        self.sessions.end(request, now, request.error)
        self.trace.end(now, record.number, outcome)
        self._progress.ended(request, len(self.result.gauges))
        check_tokens(request, ticket.job, self._model.windows)

    def _gauge(self, now: float, seconds: float, num_decodes: int, prefill_tokens: int) -> Gauge:
        return Gauge(
            now_s=now,
            seconds=seconds,
            running=len(self.scheduler.running.requests),
            waiting=len(self.scheduler.waiting),
            decodes=num_decodes,
            prefill_tokens=prefill_tokens,
            live=max(pool.num_live / pool.num_blocks for pool in self.manager.pools),
        )


def _source(order: Fill) -> str:
    if isinstance(order.content, Packed):
        return "pool"
    return "cold" if order.rung else "own"


def _is_computed(branch: Branch) -> bool:
    return branch.sequence is not None and branch.sequence.length == len(branch.tokens)
