"""Carrying out plans on the model: one after the other, or one ahead."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvq.blockmgr import SwapIn, SwapOut
from kvq.engine.device.runner import Runner, StepOutput, join
from kvq.engine.requests.request_state import Job
from kvq.engine.sampling.choose import PendingChoices, describe
from kvq.engine.speculation.speculator import Drafts, Speculator
from kvq.errors import EngineError, KVQError
from kvq.scheduler import Request, Scheduler, StepPlan

_log = logging.getLogger("kvq")
IN_TURNS = (
    64  # steps after one that was to run aside and had no threads: its tokens came a step late for nothing
)
LONG_STEP_S = 0.02  # on a CPU: what Python takes of it is not worth that who comes waits for one more


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


@dataclass(slots=True)
class _Ahead:
    """A step that is launched before the one before it is settled."""

    plan: StepPlan
    failed: list[SwapIn]
    output: StepOutput | None  # None before it was launched, and if the forward pass raised
    scheduling_s: float
    forward_s: float = 0.0
    launched_s: float = 0.0  # of these, after what the step before computed


class Launcher:
    """Runs plans; what raises is found branch by branch, so that only the guilty request ends.

    `runs_ahead`: launch steps while the one before them is settled; None: where it pays.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        jobs: Mapping[Request, Job],
        clock: Callable[[], float],
        *,
        runs_ahead: bool | None,
        speculator: Speculator | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._jobs = jobs
        self._clock = clock
        self._runs_ahead = runs_ahead
        self._speculator = speculator
        self._ahead: _Ahead | None = None
        self._planned: _Ahead | None = None  # not launched yet, as it lacks its tokens
        self._num_in_turns = 0  # steps to come that are not launched ahead unless that was asked for

    def forget(self) -> None:
        """Drop the step that was launched ahead: all its requests end."""
        if self._ahead is not None:  # it may run: forgotten only when it ended, if this is interrupted, too
            _has_ended(self._ahead)
        self._ahead = self._planned = None

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
        ahead, self._planned = self._planned, None
        live = [i for i, branch in enumerate(plan.branches) if not branch.is_done]
        drew, began = pending.drew(live), self._clock()
        if ahead is None:
            ahead = self._plan_ahead(plan) if drew else None
            if ahead is None:
                return
            self._make_ready(ahead)
        self._ahead = ahead
        if not drew:  # some end here: it is run when that is settled
            ahead.output = None
            return
        assert ahead.plan.follows is not None, "planned ahead"
        planned = self._clock()
        try:
            tokens = pending.tokens(ahead.plan.follows)
            if ahead.output is None:
                ahead.output = self._runner.forward(ahead.plan, ahead.failed, tokens=tokens)
            else:
                is_aside = ahead.output.begin(tokens)
                self._num_in_turns = 0 if is_aside else IN_TURNS
        except Exception:  # noqa: BLE001 - it runs again when its tokens are known, and apart if need be
            _log.exception("step %d failed; running it again", ahead.plan.number)
            ahead.output = None
        if self._speculator is not None:
            self._speculator.skip()
        ended = self._clock()
        ahead.forward_s += ended - planned
        ahead.launched_s = ended - began

    def _plan_ahead(self, plan: StepPlan) -> _Ahead | None:
        """Plan the step after `plan`, if it depends on nothing but its tokens and may run ahead."""
        if not self._may_run_ahead(plan.num_decodes):
            return None
        began = self._clock()
        ahead = self._scheduler.schedule_ahead(plan)
        if ahead is None or ahead.follows is None:
            return None
        return _Ahead(ahead, [], None, self._clock() - began)

    def _may_run_ahead(self, num_decodes: int) -> bool:
        if self._speculator is not None and self._speculator.may_draft:  # drafts depend on tokens
            return False
        if self._runs_ahead is not None:
            return self._runs_ahead
        if self._num_in_turns:
            self._num_in_turns -= 1
            return False
        return self._runner.runs_aside and self._scheduler.costs.decode_s(num_decodes) < LONG_STEP_S

    def _make_ready(self, ahead: _Ahead) -> None:
        """Do for a step all that doesn't take its tokens."""
        began = self._clock()
        ahead.failed = self._runner.prepare(ahead.plan)
        try:
            ahead.output = self._runner.get_ready(ahead.plan, ahead.failed)
        except Exception:  # noqa: BLE001 - it is launched the other way, which tells whom it concerns
            _log.exception("step %d could not be made ready", ahead.plan.number)
        ahead.forward_s = self._clock() - began

    def take_ahead(self) -> _Ahead | None:
        """The step that was launched ahead; None if nobody of it is left."""
        ahead = self._ahead
        if ahead is None or any(not branch.is_done for branch in ahead.plan.branches):
            return ahead
        self.forget()
        return None

    def get_ready(self, ahead: _Ahead) -> None:
        """While a step runs aside, make the one after it ready."""
        if ahead.output is not None and ahead.output.aside is not None:
            self._planned = self._plan_ahead(ahead.plan)
            if self._planned is not None and not self._planned.plan.orders:
                self._make_ready(self._planned)

    def resume(self, ahead: _Ahead) -> Launched:
        """Go on with a step that was launched ahead, now that the one before it is settled."""
        running, self._ahead = self._launched(ahead), None
        if self._planned is not None and self._planned.plan.orders:  # over blocks that the step writes
            self._make_ready(self._planned)
        return running

    def _launched(self, ahead: _Ahead) -> Launched:
        """What came of it; it is run again if it raised."""
        began = self._clock()
        if ahead.output is not None and _has_ended(ahead):
            forward_s = ahead.forward_s + self._clock() - began
            return Launched(ahead.plan, ahead.output, {}, ahead.scheduling_s, forward_s)
        plan = ahead.plan.after_all()
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


def _has_ended(ahead: _Ahead) -> bool:
    """Wait for a step's end; False if it raised."""
    try:
        if ahead.output is not None:
            ahead.output.wait()
    except Exception:  # noqa: BLE001 - it runs again when its tokens are known, and apart if need be
        _log.exception("step %d failed; running it again", ahead.plan.number)
        return False
    return True


def _step_failed(error: Exception) -> EngineError:
    return EngineError(f"the step of this request raised {describe(error)}")
