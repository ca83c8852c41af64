"""Step in flight: a plan, what came of it so far, and the time that each part of it took."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, get_args

from kvq.blockmgr import SwapIn
from kvq.engine.device.runner import StepOutput
from kvq.engine.requests.request_state import Job
from kvq.engine.sampling.choose import Wanted
from kvq.engine.speculation.speculator import Drafts
from kvq.errors import KVQError
from kvq.scheduler import StepPlan

Part = Literal["scheduling", "drafting", "forward", "sampling", "settling"]
_NOTHING: dict[Part, float] = dict.fromkeys(get_args(Part), 0.0)


# D234: two steps are in flight at most, and the second depends on nothing but the tokens of the first.
class Phase(Enum):
    """Phase of a step in flight."""

    PLANNED = "planned"  # its slots are taken; tokens of the step before it may be missing
    READY = "ready"  # its orders are carried out
    RUNNING = "running"  # its forward pass has begun
    DONE = "done"  # its output is there


class Stopwatch:
    """Seconds of one step by part. One part at a time is measured, none while another step has its turn."""

    __slots__ = ("_began", "_clock", "_overlapped_s", "_part", "_seconds")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = _NOTHING.copy()
        self._part: Part | None = None  # that is measured now
        self._began = 0.0
        self._overlapped_s = 0.0

    def __getitem__(self, part: Part) -> float:
        return self._seconds[part]

    @property
    def seconds(self) -> float:
        """All parts together, except work that was done while another step ran."""
        return sum(self._seconds.values()) - self._overlapped_s

    def start(self, part: Part, since: float | None = None) -> float:
        """Measure a part from now on, or from `since`; the part before it ends there. Returns that time."""
        now = self._clock() if since is None else since
        if self._part is not None:
            self._seconds[self._part] += now - self._began
        self._part, self._began = part, now
        return now

    def stop(self, *, at_least: float = 0.0) -> float:
        """End the part that is measured, which took `at_least` seconds even if it began before.

        Returns the time.
        """
        now = self._clock()
        if self._part is not None:
            seconds = now - self._began
            self._seconds[self._part] += seconds if seconds > at_least else at_least
            self._part = None
        return now

    def leave_out(self, seconds: float) -> None:
        """Leave that out of the part that is measured now: another step had its turn."""
        self._began += seconds

    def overlap(self) -> None:
        """Stop, and leave all that was measured so far out of `seconds`: another step ran meanwhile."""
        self.stop()
        self._overlapped_s = sum(self._seconds.values())


@dataclass(slots=True, eq=False)
class Flight:
    """One step on its way from its plan to its tokens. The next one may start while this one is settled."""

    plan: StepPlan
    watch: Stopwatch
    phase: Phase = Phase.PLANNED
    failed_swaps: list[SwapIn] = field(default_factory=list)
    drafts: Drafts = field(default_factory=dict)
    output: StepOutput | None = None  # from READY on where the pass can be laid out without its tokens
    errors: dict[Job, KVQError] = field(default_factory=dict)  # of requests that can't go on
    wanted: Wanted | None = None  # what is to be chosen from the output
    following: "Flight | None" = None  # the next step, if it was planned ahead

    @property
    def runs_concurrently(self) -> bool:
        """True while its forward pass runs in threads of its own."""
        return self.phase is Phase.RUNNING and self.output is not None and self.output.concurrent is not None

    def result(self) -> StepOutput:
        """Return the output of a step that has one."""
        assert self.output is not None, f"a step that is {self.phase.value} has no output"
        return self.output
