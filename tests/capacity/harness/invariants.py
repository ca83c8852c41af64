"""What must hold in every simulation: everybody ends, nothing stays behind, nobody waits for ever."""

from bisect import bisect_right
from dataclasses import dataclass, field

from kvq.scheduler import Request, Scheduler, StepPlan

_MOST_IDLE = 200  # steps in a row that bring nobody on
_PATIENCE = 150  # steps that anybody may wait, however little is ahead
_STEPS_PER_TOKEN = 1.5  # more of them per token of the work ahead


@dataclass(slots=True)
class _Arrival:
    step: int
    ahead: int  # tokens of all requests that were there
    before: int  # tokens of all requests that had ever arrived


@dataclass(slots=True)
class Progress:
    """Sees to it that work goes on, and that nobody is overtaken for ever."""

    aging_s: float
    idle: int = 0  # steps since anything got on
    _there: int = 0
    _total: int = 0
    _work: dict[Request, int] = field(default_factory=dict)
    _arrivals: dict[Request, _Arrival] = field(default_factory=dict)  # of those never admitted
    _times: list[float] = field(default_factory=list)  # of arrivals, with `_totals` after each
    _totals: list[int] = field(default_factory=list)

    def arrived(self, request: Request, step: int, now: float) -> None:
        """A request is in line."""
        assert request.max_tokens is not None, "the scheduler sets it"
        work = request.prompt_length + request.num_branches * request.max_tokens
        self._arrivals[request] = _Arrival(step, self._there, self._total + work)
        self._work[request] = work
        self._there += work
        self._total += work
        self._times.append(now)
        self._totals.append(self._total)

    def ended(self, request: Request, step: int) -> None:
        """A request is gone."""
        self._there -= self._work.pop(request)
        self.admitted(request, step)
        self.idle = 0

    def admitted(self, request: Request, step: int) -> None:
        """A request got blocks, or left: it waited no longer than what went before it explains.

        That is all that was there when it arrived, and what arrived until it could have aged.
        """
        arrival = self._arrivals.pop(request, None)
        if arrival is None:
            return
        until = bisect_right(self._times, request.arrival_s + self.aging_s)
        ahead = arrival.ahead + (self._totals[until - 1] if until else 0) - arrival.before
        waited = step - arrival.step

        assert waited <= _PATIENCE + _STEPS_PER_TOKEN * ahead, (
            f"request {request.id} waited {waited} steps behind {ahead} tokens of others"
        )

    def stepped(self, plan: StepPlan | None) -> None:
        """A step was made, or none was possible although there is work."""
        self.idle = 0 if plan is not None and plan.branches else self.idle + 1
        assert self.idle <= _MOST_IDLE, f"nobody got on in {self.idle} steps"


def check_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    """Raise AssertionError unless a plan keeps the limits of a step, decodes first."""
    config = scheduler.config
    assert plan.num_tokens == sum(plan.counts) <= config.max_num_batched_tokens, "the step is too large"
    assert len(plan.branches) <= config.max_num_seqs, "too many sequences run"
    assert len(set(plan.branches)) == len(plan.branches), "a branch runs twice in a step"
    decodes = zip(plan.counts[: plan.num_decodes], plan.drafts, strict=False)
    assert all(count == 1 + drafts for count, drafts in decodes), "a decode has one token, and its drafts"
    assert not any(plan.drafts[plan.num_decodes :]), "only decodes have drafts"


def check_known(scheduler: Scheduler) -> None:
    """Raise AssertionError if the block manager was told of tokens that a branch does not have."""
    for branch in scheduler.running.active:
        sequence = branch.sequence
        assert sequence is not None, "an active branch has blocks"
        assert sequence.length == sequence.committed <= len(branch.tokens), "drafts were kept"
        known = sequence.tokens
        assert known == branch.tokens[: len(known)], f"request {branch.request.id}: a draft may be indexed"


def check_empty(scheduler: Scheduler) -> None:
    """Raise AssertionError unless nothing is left of all that was there."""
    manager = scheduler.manager
    manager.expire(float("inf"))
    manager.check_integrity()
    assert not scheduler.has_work, "requests are left"
    assert not scheduler.running.active, "branches are active after their requests ended"
    assert scheduler.running.num_sequences == 0, "rows were lost, or given back twice"
    assert not manager.sequences(), "sequences were not freed"
    assert not manager.prefixes.computing(), "somebody may wait for what nobody computes"
    live = [usage.live for usage in manager.usage()]
    assert not any(live), f"{live} blocks are live after everybody ended"
    assert not scheduler.loading, "loads are left"
