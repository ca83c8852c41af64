"""A smaller model as the draft, with a cache of its own."""

from array import array
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from kvq.blockmgr import Sequence
from kvq.engine.job import Job
from kvq.engine.sampling.sampler import Sampler
from kvq.engine.speculation.drafter import Bind, Drafter, Growing
from kvq.errors import ConfigError
from kvq.models import Model
from kvq.models.session import Session
from kvq.scheduler import Branch, StepPlan

_CHUNK = 512  # prompt tokens of one branch that the draft computes in a step


def check_same_vocabulary(target: Model, draft: Model) -> None:
    """Raise ConfigError unless two models mean the same by every token."""
    ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    if ours == theirs:
        return
    differ = [token for token in {**ours, **theirs} if ours.get(token) != theirs.get(token)]
    shown = ", ".join(f"{token!r} ({ours.get(token)} and {theirs.get(token)})" for token in sorted(differ)[:3])
    raise ConfigError(
        f"a draft model needs the vocabulary of the model it drafts for, but {draft.prepared.source.name} has "
        f"{len(theirs):,} tokens, {target.prepared.source.name} {len(ours):,}, and {len(differ):,} of them "
        f"differ: {shown}; take a model of the same family"
    )


def check_draft(target: Model, draft: Model) -> None:
    """Raise ConfigError if a model can't draft for another."""
    if draft.geometry.states:
        raise ConfigError(
            f"{draft.prepared.source.name} keeps recurrent states, which can't go back behind rejected drafts; "
            f"take a draft model whose layers all attend"
        )
    draft.recipe.check_unstaged("a draft model")
    if any(layer.window is not None for layer in draft.geometry.layers):
        raise ConfigError(
            f"{draft.prepared.source.name} has sliding windows, which its draft's cache can't go back in; take "
            f"another draft model"
        )
    check_same_vocabulary(target, draft)


@dataclass(slots=True, eq=False)
class _Mirror:
    """A branch in the draft's cache."""

    sequence: Sequence
    fed: "array[int]" = field(default_factory=lambda: array("I"))  # its tokens there


class DraftModel(Drafter):
    """Keeps a sequence of the draft's own for every branch, and brings it up to where the branch is."""

    def __init__(self, sampler: Sampler, bind: Bind, session: Session, *, vocab_size: int) -> None:
        super().__init__(sampler, bind)
        self._session = session
        self._vocab_size = vocab_size  # of the target
        self._mirrors: dict[Branch, _Mirror] = {}
        self._gone: set[Branch] = set()  # whose K and V were not finite
        self.draft_share = 0.3

    def most(self, branch: Branch, job: Job, limit: int) -> int:
        """None while the draft is behind by more than a chunk, or has no room."""
        if branch in self._gone:
            return 0
        session, tokens = self._session, branch.tokens
        mirror = self._mirrors.get(branch)
        if mirror is None:
            mirror = self._mirrors[branch] = _Mirror(session.new_sequence())
        common = _common(mirror.fed, tokens)
        if common < len(mirror.fed):
            session.manager.truncate(mirror.sequence, common)
            del mirror.fed[common:]
        limit = min(limit, session.weights.max_context - len(tokens))
        behind = len(tokens) - len(mirror.fed)
        if limit <= 0 or not session.manager.can_append([(mirror.sequence, behind + limit - 1)]):
            return 0
        if behind > _CHUNK:
            self._feed([(branch, tokens[len(mirror.fed) :][:_CHUNK])])
            return 0
        return limit

    def logits(self, plan: StepPlan, growing: list[Growing]) -> Tensor:
        """Behind all that each branch has and its drafts so far."""
        work = []
        for one in growing:
            fed = len(self._mirrors[one.branch].fed)
            work.append((one.branch, array("I", [*one.branch.tokens, *one.tokens][fed:])))
        rows = self._feed(work)
        missing = self._vocab_size - rows.shape[-1]
        return functional.pad(rows, (0, missing), value=-torch.inf) if missing else rows

    def forget(self, branch: Branch, job: Job) -> None:
        """Free its sequence."""
        mirror = self._mirrors.pop(branch, None)
        self._gone.discard(branch)
        if mirror is not None:
            self._session.free(mirror.sequence)

    def _feed(self, work: "list[tuple[Branch, array[int]]]") -> Tensor:
        mirrors = [self._mirrors[branch] for branch, _ in work]
        results = self._session.forward(
            [(mirror.sequence, tokens.tolist()) for mirror, (_, tokens) in zip(mirrors, work, strict=True)]
        )
        for mirror, (branch, tokens), result in zip(mirrors, work, results, strict=True):
            mirror.fed.extend(tokens)
            if not result.finite:
                self._gone.add(branch)
        return torch.cat([result.logits for result in results])


def _common(fed: "array[int]", tokens: "array[int]") -> int:
    """How many first tokens are alike, one of `tokens` left out at least, to be computed."""
    most = min(len(fed), len(tokens) - 1)
    if fed[:most] == tokens[:most]:
        return most
    return next(i for i in range(most) if fed[i] != tokens[i])
