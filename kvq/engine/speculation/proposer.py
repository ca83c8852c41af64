"""Proposer: interface of everything that proposes drafts."""

from abc import ABC, abstractmethod

from kvq.engine.device.runner import StepOutput
from kvq.engine.requests.request_state import Job
from kvq.engine.sampling.sampler import Drafted
from kvq.scheduler import Branch, StepPlan


class Proposer(ABC):
    """Says how many drafts it has for a branch, then proposes them. Drafts may be wrong."""

    takes_passes: bool  # drafting takes a pass of a model for each further token

    @abstractmethod
    def most(self, branch: Branch, job: Job, limit: int) -> int:
        """Return how many drafts it can make for a branch now, at most `limit`."""

    @abstractmethod
    def propose(self, plan: StepPlan) -> dict[int, list[Drafted]]:
        """Return exactly `plan.drafts[i]` drafts for each branch with any, by index."""

    def observe(self, plan: StepPlan, output: StepOutput) -> None:  # noqa: B027 - see below
        """Follow a step that ran, before its next tokens are known."""

    def forget(self, branch: Branch, job: Job) -> None:  # noqa: B027 - not every proposer keeps something
        """Drop what is kept of a branch that ended."""

    def reset(self) -> None:  # noqa: B027 - see above
        """Forget what ended requests left behind."""

    def close(self) -> None:  # noqa: B027 - see above
        """Release what lies outside the device."""
