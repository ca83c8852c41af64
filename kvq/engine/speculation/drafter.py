"""Drafting by a model, token by token: logits, a draw with each request's own parameters, and on."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from kvq.engine.grammar.walk import Walk
from kvq.engine.requests.request_state import Job
from kvq.engine.sampling.sampler import Drafted, Sampler
from kvq.engine.speculation.proposer import Jobs, Proposer
from kvq.scheduler import Branch, StepPlan

Bind = Callable[[Job, Branch], object]


@dataclass(slots=True, eq=False)
class Growing:
    """The drafts of one branch in the making."""

    index: int  # of the plan
    branch: Branch
    walk: Walk | None  # through its grammar
    is_marked: bool  # by a watermark
    drafts: list[Drafted] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Drafted so far."""
        return [draft.token for draft in self.drafts]


class Drafter(Proposer):
    """Asks a model for one more token of every branch that shall have one, as often as there are to be."""

    takes_passes = True

    def __init__(self, sampler: Sampler, bind: Bind) -> None:
        """`bind`: sees to it that the sampler knows a branch's row."""
        self._sampler = sampler
        self._bind = bind

    def most(self, branch: Branch, job: Job, limit: int) -> int:
        """As many as it may."""
        return limit

    @abstractmethod
    def logits(self, plan: StepPlan, growing: list[Growing]) -> Tensor:
        """[branches, vocab]: what may follow the drafts that each has so far."""

    def propose(self, plan: StepPlan, jobs: Jobs) -> dict[int, list[Drafted]]:
        """Pass by pass; a branch whose grammar has ended gets tokens that will be wrong."""
        all_growing = []
        for i, (branch, count) in enumerate(zip(plan.branches, plan.drafts, strict=True)):
            if count:
                job = jobs[branch.request]
                matcher = job.results[job.index_of(branch)].matcher
                walk = None if matcher is None else Walk(matcher)
                all_growing.append(Growing(i, branch, walk, is_marked=bool(job.params.watermark)))
                self._bind(job, branch)
        for number in range(max(plan.drafts)):
            growing = [one for one in all_growing if plan.drafts[one.index] > number]
            self._grow(growing, self.logits(plan, growing))
        return {one.index: one.drafts for one in all_growing}

    def _grow(self, growing: list[Growing], logits: Tensor) -> None:
        masks = {}
        for place, one in enumerate(growing):
            if one.walk is not None and (mask := one.walk.mask()) is not None:
                masks[place] = mask
        missing = self._sampler.vocab_size - logits.shape[-1]  # models of one vocabulary may be padded apart
        drawn = self._sampler.draft(
            functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits,
            [one.branch.row for one in growing],  # type: ignore[misc]  # whoever computes has a row
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
