"""Step in flight: a plan, its results so far, and the time that each part of the step took."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, get_args

from kvq.engine.device.runner import StepOutput
from kvq.engine.requests.request_state import Job, as_job
from kvq.engine.sampling.choose import Choices, Wanted
from kvq.engine.speculation.speculator import Drafts, Speculator
from kvq.errors import KVQError
from kvq.scheduler import StepPlan

Part = Literal["scheduling", "drafting", "forward", "sampling", "settling"]
_NOTHING: dict[Part, float] = dict.fromkeys(get_args(Part), 0.0)


# D234: at most two steps are in flight, and the second depends only on the tokens of the first.
class Phase(Enum):
    """Phase of a step in flight."""

    PLANNED = "planned"  # its slots are allocated; tokens of the previous step may be missing
    READY = "ready"  # its orders have been carried out
    RUNNING = "running"  # its forward pass has begun
    DONE = "done"  # its output is available


class Stopwatch:
    """Stopwatch for the parts of one step. It measures one part at a time and pauses for other steps."""

    __slots__ = ("_began", "_clock", "_overlapped_s", "_part", "_seconds")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = _NOTHING.copy()
        self._part: Part | None = None  # the part that is being measured
        self._began = 0.0
        self._overlapped_s = 0.0

    def __getitem__(self, part: Part) -> float:
        return self._seconds[part]

    @property
    def seconds(self) -> float:
        """Total time of all parts, except work done while another step was running."""
        return sum(self._seconds.values()) - self._overlapped_s

    def start(self, part: Part, since: float | None = None) -> float:
        """Start measuring a part, now or at `since`, and end the previous part. Return the start time."""
        now = self._clock() if since is None else since
        if self._part is not None:
            self._seconds[self._part] += now - self._began
        self._part, self._began = part, now
        return now

    def stop(self, *, at_least: float = 0.0) -> float:
        """Stop measuring the current part; it counts for at least `at_least` seconds.

        Returns the current time.
        """
        now = self._clock()
        if self._part is not None:
            seconds = now - self._began
            self._seconds[self._part] += seconds if seconds > at_least else at_least
            self._part = None
        return now

    def leave_out(self, seconds: float) -> None:
        """Subtract `seconds`, spent on another step, from the part that is being measured."""
        self._began += seconds

    def overlap(self) -> None:
        """Stop, and exclude everything measured so far from `seconds`, since another step was running."""
        self.stop()
        self._overlapped_s = sum(self._seconds.values())


@dataclass(slots=True, eq=False)
class Flight:
    """One step, from its plan to its tokens. The next step may start while this step is being settled."""

    plan: StepPlan
    watch: Stopwatch
    phase: Phase = Phase.PLANNED
    drafts: Drafts = field(default_factory=dict)
    output: StepOutput | None = None  # from READY on if the pass can be laid out without its tokens
    errors: dict[Job, KVQError] = field(default_factory=dict)  # of requests that can't continue
    wanted: Wanted | None = None  # the tokens to choose from the output
    following: "Flight | None" = None  # the next step, if it was planned ahead

    @property
    def runs_concurrently(self) -> bool:
        """True while the forward pass runs in separate threads."""
        return self.phase is Phase.RUNNING and self.output is not None and self.output.concurrent is not None

    def result(self) -> StepOutput:
        """Return the step's output, which must exist."""
        assert self.output is not None, f"a step that is {self.phase.value} has no output"
        return self.output


def kept_tokens(flight: Flight, choices: Choices, speculator: Speculator | None, index: int) -> list[int]:
    """Return the tokens that continue a branch: none, one, or the accepted drafts and the next token."""
    branch, drafts = flight.plan.branches[index], flight.plan.drafts[index]
    chosen = [token for token, _ in choices.tokens.get(index, ())]
    if not drafts or branch.is_done or not chosen:
        return chosen
    accepted = len(chosen) - 1
    assert speculator is not None, "drafts come from it"
    speculator.learn(branch, drafts, accepted)
    if accepted == drafts:
        flight.result().keep_states(index)
    return chosen[: as_job(branch.request).until_end(branch, chosen)]
