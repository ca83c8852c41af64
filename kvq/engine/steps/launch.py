"""Launcher: advances steps through their phases, one after another or one step ahead."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvq.blockmgr import Demote, Fill, Order, Pack
from kvq.engine.device.runner import Runner, StepOutput, join
from kvq.engine.requests.request_state import as_job
from kvq.engine.sampling.choose import Choices, describe
from kvq.engine.speculation.speculator import Speculator
from kvq.engine.steps.flight import Flight, Phase, Stopwatch
from kvq.errors import EngineError
from kvq.scheduler import Scheduler

_log = logging.getLogger("kvq")
# Steps to run without launching ahead after a step that found no free threads and only delayed its tokens.
IN_TURNS = 64
# D114: CPU steps run ahead unless they are long
LONG_STEP_S = 0.02  # on a CPU: a new request would wait for one more long step, to save little Python time


@dataclass(slots=True, eq=False)
class Launcher:
    """Launcher of steps. If a forward pass fails, its branches run one by one, and only failing requests end.

    `runs_ahead`: whether to launch a step while the previous one is being settled (None: if it pays off).
    """

    scheduler: Scheduler
    runner: Runner
    clock: Callable[[], float]
    runs_ahead: bool | None
    speculator: Speculator | None
    holds: bool = False  # whether something waits until no step runs
    _num_in_turns: int = 0  # upcoming steps that are not launched ahead unless this is configured

    def run(self, flight: Flight) -> None:
        """Run a step to its end. If a step launched ahead failed, run it again with known tokens."""
        if flight.phase is Phase.PLANNED:
            self._get_ready(flight)
        if flight.phase is Phase.RUNNING and _has_ended(flight):
            flight.watch.stop(at_least=flight.result().concurrent_s)
        else:
            if flight.plan.follows is not None:
                flight.plan, flight.wanted = flight.plan.after_all(), None
            self._forward(flight)
        flight.phase = Phase.DONE

    def forget(self, flight: Flight) -> None:
        """Drop a step and the next one. Wait for any running pass first, since it still writes to blocks."""
        if flight.phase is Phase.RUNNING:
            _has_ended(flight)
        if flight.following is not None:
            self.forget(flight.following)
        flight.following = None

    def plan_next(self, flight: Flight) -> None:
        """Plan the step after `flight` while `flight` runs, and prepare it unless blocks have to move."""
        if not flight.runs_concurrently:
            return
        following = self._plan_ahead(flight)
        if following is not None:
            if not following.plan.orders:
                self._get_ready(following)
            following.watch.overlap()

    def launch_ahead(self, flight: Flight, choices: Choices) -> None:
        """Launch the next step before the tokens of `flight` are known, if nothing else is missing."""
        all_drew = choices.drew([i for i, branch in enumerate(flight.plan.branches) if not branch.is_done])
        following = flight.following
        if following is None and all_drew:
            following = self._plan_ahead(flight)
        if following is None:
            return
        began = following.watch.start("forward")
        if following.phase is Phase.PLANNED:
            self._get_ready(following)
        if all_drew:
            self._begin(following, choices)
        else:  # some branches end here: run the step once this one is settled
            following.output = None
        flight.watch.leave_out(following.watch.stop() - began)

    def _plan_ahead(self, flight: Flight) -> Flight | None:
        """Plan the step after `flight` if that step needs only the tokens of `flight` and may run ahead."""
        if not self._may_run_ahead(flight.plan.num_decodes):
            return None
        watch = Stopwatch(self.clock)
        watch.start("scheduling")
        plan = self.scheduler.schedule_ahead(flight.plan)
        flight.following = None if plan is None else Flight(plan, watch)
        return flight.following

    def _may_run_ahead(self, num_decodes: int) -> bool:
        if self.holds or (
            self.speculator is not None and self.speculator.may_draft
        ):  # drafts depend on tokens
            return False
        if self.runs_ahead is not None:
            return self.runs_ahead
        if self._num_in_turns:
            self._num_in_turns -= 1
            return False
        return self.runner.runs_concurrently and self.scheduler.costs.decode_s(num_decodes) < LONG_STEP_S

    def _get_ready(self, flight: Flight) -> None:
        """Carry out a planned step's orders, then draft, or lay out a forward pass without its tokens."""
        plan, began = flight.plan, flight.watch.start("forward")
        self.runner.prepare(plan)
        if num_moved := sum(map(_num_moved, plan.orders)):
            self.scheduler.costs.observe_move(num_moved / 2, self.clock() - began)
        if plan.follows is None:
            if self.speculator is not None:
                flight.watch.start("drafting")
                flight.drafts = self.speculator.draft(plan)
                flight.watch.start("forward")
        else:
            try:
                flight.output = self.runner.get_ready(plan)
            except Exception:  # noqa: BLE001 - it is launched the other way, which finds the failing request
                _log.exception("step %d could not be made ready", plan.number)
        flight.phase = Phase.READY

    def _begin(self, flight: Flight, choices: Choices) -> None:
        """Launch a prepared step with the tokens sampled on the device."""
        plan, flight.phase = flight.plan, Phase.RUNNING
        assert plan.follows is not None, "planned ahead"
        try:
            tokens = choices.drawn(plan.follows)
            if flight.output is None:
                flight.output = self.runner.forward(plan, tokens=tokens)
            else:
                self._num_in_turns = 0 if flight.output.begin(tokens) else IN_TURNS
        except Exception:  # noqa: BLE001 - it runs again once its tokens are known, split if necessary
            _log.exception("step %d failed; running it again", plan.number)
            flight.phase, flight.output = Phase.READY, None
        if self.speculator is not None:
            self.speculator.skip()

    def _forward(self, flight: Flight) -> None:
        """Run the forward pass of a step whose tokens are known. If the pass fails, run each branch alone."""
        plan, rows = flight.plan, {}
        flight.errors = {}
        pools = any(as_job(branch.request).pools for branch in plan.branches)
        for i, (branch, count, end) in enumerate(zip(plan.branches, plan.counts, plan.ends, strict=True)):
            if plan.drafts[i]:
                rows[i] = 1 + plan.drafts[i]
            elif wanted := as_job(branch.request).prompt_rows(end - count, end):
                rows[i] = wanted
        try:
            flight.output = self.runner.forward(plan, last_rows=rows, keeps_hidden=pools)
        except Exception as error:  # noqa: BLE001 - any error from a model, a kernel or a hook
            _log.exception("step %d failed; running its %d parts apart", plan.number, len(plan.branches))
            if len(plan.branches) > 1:
                self._forward_apart(flight, rows, pools)
            else:
                flight.output = self.runner.nothing(plan)
                flight.errors[as_job(plan.branches[0].request)] = _step_failed(error)

    def _forward_apart(self, flight: Flight, rows: dict[int, int], pools: bool) -> None:
        """Run the forward pass of each branch alone. A request ends if its branch fails again."""
        parts: list[StepOutput] = []
        for i, branch in enumerate(flight.plan.branches):
            part = flight.plan.part(i)
            try:
                last = {0: rows[i]} if i in rows else {}
                parts.append(self.runner.forward(part, last_rows=last, keeps_hidden=pools))
            except Exception as error:  # noqa: BLE001 - as above
                flight.errors[as_job(branch.request)] = _step_failed(error)
                parts.append(self.runner.nothing(part))
        flight.output = join(parts)


def _num_moved(order: Order) -> int:
    """Return the number of blocks that an order moves to another place or form."""
    if isinstance(order, Pack):
        return len(order.sources)
    return isinstance(order, Demote | Fill)


def _has_ended(flight: Flight) -> bool:
    """Wait for a launched forward pass to finish. Return False if it failed."""
    try:
        if flight.output is not None:
            flight.output.wait()
    except Exception:  # noqa: BLE001 - it runs again once its tokens are known, split if necessary
        _log.exception("step %d failed; running it again", flight.plan.number)
        return False
    return True


def _step_failed(error: Exception) -> EngineError:  # D236
    return EngineError(f"the step of this request raised {describe(error)}")
