"""Carrying out plans on the model: one after the other, or one ahead."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvq.blockmgr import SwapIn, SwapOut
from kvq.engine.choose import PendingChoices, describe
from kvq.engine.job import Job
from kvq.engine.runner import Runner, StepOutput, join
from kvq.engine.speculation.speculator import Drafts, Speculator
from kvq.errors import EngineError, KVQError
from kvq.scheduler import Request, Scheduler, StepPlan

_log = logging.getLogger("kvq")


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that was launched, whose requests can't go on and why, and how long that took."""

    plan: StepPlan
    output: StepOutput
    errors: dict[Request, KVQError]
    scheduling_s: float
    forward_s: float
    drafts: Drafts = field(default_factory=dict)
    drafting_s: float = 0.0  # of the forward pass's time


@dataclass(frozen=True, slots=True)
class Ahead:
    """A step that was launched before the one before it was settled."""

    plan: StepPlan
    output: StepOutput | None  # None if the forward pass raised
    scheduling_s: float
    forward_s: float


class Launcher:
    """Runs plans; what raises is found branch by branch, so that only the guilty request ends."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        jobs: Mapping[Request, Job],
        clock: Callable[[], float],
        *,
        runs_ahead: bool,
        speculator: Speculator | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._jobs = jobs
        self._clock = clock
        self._runs_ahead = runs_ahead
        self._speculator = speculator
        self._ahead: Ahead | None = None

    def forget(self) -> None:
        """Drop the step that was launched ahead: all its requests end."""
        self._ahead = None

    def launch(self, plan: StepPlan, scheduling_s: float) -> Launched:
        """Carry out a plan's orders, then its forward pass."""
        began = self._clock()
        failed = self._runner.prepare(plan)
        if num_swaps := sum(isinstance(order, SwapIn | SwapOut) for order in plan.orders):
            self._scheduler.costs.observe_swap(num_swaps / 2, self._clock() - began)
        drafts, prepared = {}, self._clock()
        if self._speculator is not None:
            drafts = self._speculator.draft(plan)
        drafted = self._clock()
        output, errors = self._run(plan, failed)
        return Launched(plan, output, errors, scheduling_s, self._clock() - began, drafts, drafted - prepared)

    def launch_ahead(self, plan: StepPlan, pending: PendingChoices) -> None:
        """Launch the step after `plan` before anybody knows what comes of that, unless it has to wait."""
        live = [i for i, branch in enumerate(plan.branches) if not branch.is_done]
        if not self._runs_ahead or not pending.drew(live) or self._drafts_next():
            return
        began = self._clock()
        ahead = self._scheduler.schedule_ahead(plan)
        if ahead is None or ahead.follows is None:
            return
        planned = self._clock()
        failed = self._runner.prepare(ahead)
        try:
            output = self._runner.forward(ahead, failed, tokens=pending.tokens(ahead.follows))
        except Exception:  # noqa: BLE001 - it runs again when its tokens are known, and apart if need be
            _log.exception("step %d failed; running it again", ahead.number)
            output = None
        self._ahead = Ahead(ahead, output, planned - began, self._clock() - planned)

    def _drafts_next(self) -> bool:
        """True if the step after this one may have drafts, which depend on its tokens."""
        return self._speculator is not None and self._speculator.may_draft

    def take_ahead(self) -> Ahead | None:
        """The step that was launched ahead; None if nobody of it is left."""
        ahead, self._ahead = self._ahead, None
        return None if ahead is None or all(branch.is_done for branch in ahead.plan.branches) else ahead

    def resume(self, ahead: Ahead) -> Launched:
        """Go on with a step that was launched ahead, now that the one before it is settled."""
        if ahead.output is not None:
            return Launched(ahead.plan, ahead.output, {}, ahead.scheduling_s, ahead.forward_s)
        plan, began = ahead.plan.after_all(), self._clock()
        output, errors = self._run(plan, [])
        return Launched(plan, output, errors, ahead.scheduling_s, self._clock() - began)

    def _run(self, plan: StepPlan, failed: list[SwapIn]) -> tuple[StepOutput, dict[Request, KVQError]]:
        """The forward pass; when it raises, branch by branch, so that only the guilty one ends."""
        rows: dict[int, int] = {}
        for i, (branch, count, end) in enumerate(zip(plan.branches, plan.counts, plan.ends, strict=True)):
            if plan.drafts[i]:
                rows[i] = 1 + plan.drafts[i]
            elif wanted := self._jobs[branch.request].prompt_rows(end - count, end):
                rows[i] = wanted
        try:
            return self._runner.forward(plan, failed, last_rows=rows), {}
        except Exception as error:  # noqa: BLE001 - whatever a model, a kernel or a hook raises
            _log.exception("step %d failed; running its %d parts apart", plan.number, len(plan.branches))
            if len(plan.branches) == 1:
                return self._runner.nothing(plan, failed), {plan.branches[0].request: _step_failed(error)}
        return self._run_apart(plan, failed, rows)

    def _run_apart(
        self, plan: StepPlan, failed: list[SwapIn], rows: dict[int, int]
    ) -> tuple[StepOutput, dict[Request, KVQError]]:
        """The forward pass of each branch alone; those that raise again end."""
        errors: dict[Request, KVQError] = {}
        parts: list[StepOutput] = []
        for i, branch in enumerate(plan.branches):
            part = plan.part(i)
            try:
                parts.append(self._runner.forward(part, [], last_rows={0: rows[i]} if i in rows else {}))
            except Exception as error:  # noqa: BLE001 - as above
                errors[branch.request] = _step_failed(error)
                parts.append(self._runner.nothing(part, []))
        return join(parts, failed), errors


def _step_failed(error: Exception) -> EngineError:
    return EngineError(f"the step of this request raised {describe(error)}")
