"""Speculator: plans the drafts of an engine's steps, and learns from the results."""

import logging
from collections.abc import Callable

from kvq.engine.device.runner import StepOutput
from kvq.engine.requests.request_state import Job, as_job
from kvq.engine.sampling.sampler import Drafted
from kvq.engine.speculation.drafter import Proposer
from kvq.engine.speculation_config import Speculation
from kvq.scheduler import Branch, Scheduler, StepPlan
from kvq.scheduler.draft_depth import Depth, drafts_allowed

_log = logging.getLogger("kvq")
_MOST_FAILURES = 3  # consecutive failures of a proposer before it is no longer used

Drafts = dict[int, list[Drafted]]  # by index in the plan


class Speculator:  # D259: states wait, and are kept once all drafts are accepted
    """Speculative decoding of an engine. A proposer makes drafts as long as they pay off."""

    def __init__(
        self, config: Speculation, proposer: Proposer, scheduler: Scheduler, clock: Callable[[], float]
    ) -> None:
        self._k = config.k
        self.looked_at = 0  # checked drafts: only drafts that follow accepted ones
        self.right = 0  # accepted drafts
        self.depth = Depth(scheduler.costs, proposer.takes_passes, adapts=config.adapts)
        self.proposer = proposer  # makes the drafts
        self._scheduler = scheduler
        self._clock = clock
        self._failures = 0

    def use(self, *, k: int, adapts: bool) -> None:
        """Make at most `k` drafts per sequence and step from now on; 0 disables drafting."""
        self._k, self.depth.adapts = k, adapts

    def plan(self) -> int:
        """Set each branch's number of drafts for the next step, and return the total."""
        if not self._k or self._failures >= _MOST_FAILURES:
            return 0
        if self.proposer.takes_passes and self.depth.rests:  # an n-gram may be found at any time
            self.depth.rest()
            return 0
        allowed = drafts_allowed(self._scheduler, self._k)
        try:
            most = self._most(allowed)
        except Exception:  # noqa: BLE001 - any error from a model; the step runs without drafts
            self._fail("looking for drafts failed")
            return 0
        chosen = self.depth.choose(most, len(allowed))
        for branch, count in chosen.items():
            branch.num_drafts = count
        return sum(chosen.values())

    @property
    def may_draft(self) -> bool:
        """False if drafts did not pay off in a recent step, so they are unlikely to pay off in the next."""
        return self._k > 0 and self._failures < _MOST_FAILURES and not self.depth.rests

    def skip(self) -> None:
        """Record a step that was planned without drafts."""
        if self.depth.rests:
            self.depth.rest()

    def draft(self, plan: StepPlan) -> Drafts:
        """Make a plan's drafts once its orders are carried out. If drafting fails, use token 0 instead."""
        if not plan.num_drafts:
            return {}
        began = self._clock()
        try:
            drafts = self.proposer.propose(plan)
        except Exception:  # noqa: BLE001 - as above
            self._fail("drafting failed")
            return {i: [Drafted(0)] * count for i, count in enumerate(plan.drafts) if count}
        self._failures = 0
        for index, drafted in drafts.items():
            plan.guess(index, [draft.token for draft in drafted])
        if self.depth.takes_passes:
            self.depth.draft_s.observe(len(drafts), (self._clock() - began) / max(plan.drafts))
        return drafts

    def observe(self, plan: StepPlan, output: StepOutput) -> None:
        """Process a step's output before the step's tokens are chosen."""
        if self._failures >= _MOST_FAILURES:
            return
        try:
            self.proposer.observe(plan, output)
        except Exception:  # noqa: BLE001 - as above
            self._fail("what drafts could not follow a step")

    def _most(self, allowed: dict[Branch, int]) -> dict[Branch, int]:
        """Return the maximum number of drafts for each branch that can have any."""
        most: dict[Branch, int] = {}
        for branch, limit in allowed.items():
            job = as_job(branch.request)
            if job.beams is None and limit and (count := self.proposer.most(branch, job, limit)) > 0:
                most[branch] = count
        return most

    def _fail(self, what: str) -> None:
        """Log the current exception. After several failures in a row, no more drafts are made."""
        self._failures += 1
        _log.exception("%s%s", what, "; no more are tried" * (self._failures == _MOST_FAILURES))

    def learn(self, branch: Branch, drafted: int, right: int) -> None:
        """Record that the first `right` of a branch's drafts were accepted."""
        self.looked_at += min(drafted, right + 1)
        self.right += right
        self.depth.learn(branch, drafted, right)

    def count(self, job: Job, drafted: int, accepted: int) -> None:
        """Count a job's drafts, and the accepted drafts that became tokens of its result."""
        counters = self._scheduler.counters
        counters.drafts += 1
        counters.drafted_tokens += drafted
        counters.accepted_tokens += accepted
        job.drafted_tokens += drafted
        job.accepted_tokens += accepted

    def forget(self, job: Job) -> None:
        """Drop the state of an ended job."""
        for branch in job.branches:
            self.depth.forget(branch)
            self.proposer.forget(branch, job)
