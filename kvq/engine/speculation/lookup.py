"""The proposer that looks up n-grams."""

from kvq.engine.job import Job
from kvq.engine.sampling.sampler import Drafted
from kvq.engine.speculation.ngram import NGrams, Recent
from kvq.engine.speculation.proposer import Jobs, Proposer
from kvq.scheduler import Branch, StepPlan


class Lookup(Proposer):
    """Guesses what followed before: in the request's own text, else in late answers to its tenant."""

    takes_passes = False

    def __init__(self) -> None:
        self._texts: dict[Branch, NGrams] = {}
        self._recent = Recent()
        self._found: dict[Branch, list[int]] = {}

    def most(self, branch: Branch, job: Job, limit: int) -> int:
        """As many as are found and, under a grammar, allowed."""
        text = self._texts.setdefault(branch, NGrams())
        text.extend(branch.tokens[len(text.tokens) :])
        found = text.following(branch.tokens, limit)
        if not found and (others := self._recent.of(_owner(job))) is not None:
            found = others.following(branch.tokens, limit)
        matcher = job.results[job.index_of(branch)].matcher
        if found and matcher is not None:
            found = found[: matcher.num_allowed(found)]
        self._found[branch] = found
        return len(found)

    def propose(self, plan: StepPlan, jobs: Jobs) -> dict[int, list[Drafted]]:
        """What `most` found."""
        return {
            i: [Drafted(token) for token in self._found[plan.branches[i]][:count]]
            for i, count in enumerate(plan.drafts)
            if count
        }

    def begin_anew(self) -> None:
        """Forget all answers."""
        self._recent = Recent()

    def forget(self, branch: Branch, job: Job) -> None:
        """Keep what was answered for later requests."""
        self._texts.pop(branch, None)
        self._found.pop(branch, None)
        self._recent.add(_owner(job), branch.tokens[job.request.prompt_length :])


def _owner(job: Job) -> tuple[str, str | None]:
    return job.request.tenant, job.request.cache_salt
