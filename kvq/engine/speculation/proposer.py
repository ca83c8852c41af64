"""What proposes drafts."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from kvq.engine.device.runner import StepOutput
from kvq.engine.requests.request_state import Job
from kvq.engine.sampling.sampler import Drafted
from kvq.scheduler import Branch, Request, StepPlan

Jobs = Mapping[Request, Job]


class Proposer(ABC):
    """Says for how many tokens of which branches it has a guess, then guesses. Guesses may be wrong."""

    takes_passes: bool  # drafting takes a pass of a model for each further token

    @abstractmethod
    def most(self, branch: Branch, job: Job, limit: int) -> int:
        """How many drafts it could make for a branch now, `limit` at most."""

    @abstractmethod
    def propose(self, plan: StepPlan, jobs: Jobs) -> dict[int, list[Drafted]]:
        """Exactly `plan.drafts[i]` drafts for each of its branches that has room for some, by index."""

    def observe(self, plan: StepPlan, output: StepOutput, jobs: Jobs) -> None:  # noqa: B027 - see below
        """A step ran, whose tokens but drafts are known; nobody knows yet what follows."""

    def forget(self, branch: Branch, job: Job) -> None:  # noqa: B027 - not everybody keeps something
        """A branch ended."""

    def begin_anew(self) -> None:  # noqa: B027 - see above
        """Forget what requests that ended left behind."""

    def close(self) -> None:  # noqa: B027 - see above
        """Give back what lies outside the device."""
