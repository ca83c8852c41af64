"""Proposer: interface for all sources of drafts, and a base class for drafting with a model."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from kvq.engine.device.runner import StepOutput
from kvq.engine.grammar.walk import Walk
from kvq.engine.requests.request_state import Job, as_job
from kvq.engine.sampling.choose import Chooser
from kvq.engine.sampling.sampler import Drafted
from kvq.scheduler import Branch, StepPlan


class Proposer(ABC):
    """Source of drafts that first reports how many it can make for a branch. Drafts may be wrong."""

    takes_passes: bool  # each further draft token takes another pass of a model

    @abstractmethod
    def most(self, branch: Branch, job: Job, limit: int) -> int:
        """Return the maximum number of drafts that can be made for a branch now, up to `limit`."""

    @abstractmethod
    def propose(self, plan: StepPlan) -> dict[int, list[Drafted]]:
        """Return exactly `plan.drafts[i]` drafts for each branch that needs drafts, keyed by index."""

    def observe(self, plan: StepPlan, output: StepOutput) -> None:  # noqa: B027 - see below
        """Process a step's output before the step's tokens are chosen."""

    def forget(self, branch: Branch, job: Job) -> None:  # noqa: B027 - not every proposer keeps state
        """Drop the state of an ended branch."""

    def reset(self) -> None:  # noqa: B027 - see above
        """Drop any state left behind by ended requests."""


@dataclass(slots=True, eq=False)
class Growing:
    """Growing list of drafts for one branch, with the branch's grammar walk."""

    index: int  # in the plan
    branch: Branch
    walk: Walk | None  # through the branch's grammar
    is_marked: bool  # the branch has a watermark
    drafts: list[Drafted] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Token ids of the drafts so far."""
        return [draft.token for draft in self.drafts]


class Drafter(Proposer):
    """Proposer that runs a model once per further draft, for all drafting branches together.

    Drafts are sampled with each request's own parameters.
    """

    takes_passes = True

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser

    def most(self, branch: Branch, job: Job, limit: int) -> int:
        """Return `limit`, since a model can always draft."""
        return limit

    @abstractmethod
    def logits(self, plan: StepPlan, growing: list[Growing]) -> Tensor:
        """Return logits [branches, vocab] after each branch's drafts so far."""

    def propose(self, plan: StepPlan) -> dict[int, list[Drafted]]:
        """Make the drafts pass by pass. Once a branch's grammar has ended, its drafts will be rejected."""
        all_growing = []
        for i, (branch, count) in enumerate(zip(plan.branches, plan.drafts, strict=True)):
            if count:
                job = as_job(branch.request)
                matcher = job.results[job.index_of(branch)].matcher
                walk = None if matcher is None else Walk(matcher)
                all_growing.append(Growing(i, branch, walk, is_marked=bool(job.params.watermark)))
                self._chooser.bind(job, branch)
        for number in range(max(plan.drafts)):
            growing = [one for one in all_growing if plan.drafts[one.index] > number]
            self._grow(growing, self.logits(plan, growing))
        return {one.index: one.drafts for one in all_growing}

    def _grow(self, growing: list[Growing], logits: Tensor) -> None:
        masks = {}
        for place, one in enumerate(growing):
            if one.walk is not None and (mask := one.walk.mask()) is not None:
                masks[place] = mask
        missing = (
            self._chooser.sampler.vocab_size - logits.shape[-1]
        )  # models with one vocabulary may be padded differently
        drawn = self._chooser.sampler.draft(
            functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits,
            [one.branch.row for one in growing],  # type: ignore[misc]  # branches that compute have a row
            [one.branch.num_generated + len(one.drafts) for one in growing],
            masks=masks or None,
            ahead={place: one.tokens for place, one in enumerate(growing)},
            contexts={
                place: [*one.branch.tokens, *one.tokens] for place, one in enumerate(growing) if one.is_marked
            },
        )
        for one, draft in zip(growing, drawn, strict=True):
            one.drafts.append(draft)
            if one.walk is not None:
                one.walk.accept(draft.token)
