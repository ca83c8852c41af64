"""Draft model: drafting by a smaller model with a separate cache."""

from array import array
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvq.blockmgr import Sequence
from kvq.engine.requests.request_state import Job
from kvq.engine.sampling.choose import Chooser
from kvq.engine.speculation.drafter import Drafter, Growing
from kvq.errors import ConfigError, OutOfBlocks
from kvq.formats import KVRecipe
from kvq.models.loading.prepared import PreparedModel
from kvq.models.run.session import Session
from kvq.scheduler import Branch, StepPlan

_CHUNK = 512  # prompt tokens of one branch that the draft model computes in a step


def check_draft(target: PreparedModel, draft: PreparedModel, recipe: KVRecipe) -> None:
    """Raise ConfigError if a model with this KV recipe can't draft for another model."""
    name = draft.source.name
    if draft.geometry.states:
        raise ConfigError(
            f"{name} keeps recurrent states, which can't go back behind rejected drafts; take a draft model "
            f"whose layers all attend"
        )
    if any(layer.window is not None for layer in draft.geometry.layers):
        raise ConfigError(
            f"{name} has sliding windows, which can't go back behind rejected drafts; take another draft "
            f"model"
        )
    recipe.check_unstaged("a draft model")
    ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    if ours == theirs:
        return
    differ = sorted(token for token in {**ours, **theirs} if ours.get(token) != theirs.get(token))
    shown = ", ".join(f"{token!r} ({ours.get(token)} and {theirs.get(token)})" for token in differ[:3])
    raise ConfigError(
        f"a draft model needs the vocabulary of the model it drafts for, but {target.source.name} has "
        f"{len(ours):,} tokens, {name} {len(theirs):,}, and {len(differ):,} are not the same: {shown}; "
        f"take a model of the same family"
    )


@dataclass(slots=True, eq=False)
class _Mirror:
    """Copy of a branch in the draft model's cache."""

    sequence: Sequence
    fed: "array[int]" = field(default_factory=lambda: array("I"))  # the branch's tokens in the cache


class DraftModel(Drafter):
    """Drafter that runs a smaller model, with a sequence per branch that catches up with the branch."""

    def __init__(self, chooser: Chooser, session: Session) -> None:
        super().__init__(chooser)
        self.session = session
        self._mirrors: dict[Branch, _Mirror] = {}
        self._gone: set[Branch] = set()  # branches whose K and V were not finite

    def most(self, branch: Branch, job: Job, limit: int) -> int:
        """Return at most `limit`, or 0 if the draft model is more than a chunk behind or has no room."""
        if branch in self._gone:
            return 0
        session, tokens = self.session, branch.tokens
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
        """Return logits after each branch's tokens and drafts so far."""
        work = []
        for one in growing:
            known, fed = one.branch.tokens, len(self._mirrors[one.branch].fed)
            missing = known[fed:]
            missing.extend(one.tokens[max(0, fed - len(known)) :])
            work.append((one.branch, missing))
        return self._fed(work)

    def forget(self, branch: Branch, job: Job) -> None:
        """Free the sequence of a branch that ended."""
        self._gone.discard(branch)
        if branch in self._mirrors:
            self._drop(branch)

    def _fed(self, work: "list[tuple[Branch, array[int]]]") -> Tensor:
        """Return logits after the tokens in `work`; zeros for branches that get no blocks."""
        try:
            return self._feed(work)
        except OutOfBlocks:
            mine = {branch for branch, _ in work}
            for branch in [branch for branch in self._mirrors if branch not in mine]:
                self._drop(branch)
        parts = []
        for one in work:
            try:
                parts.append(self._feed([one]))
            except OutOfBlocks:
                self._drop(one[0])
                self._mirrors[one[0]] = _Mirror(self.session.new_sequence())
                weights = self.session.weights
                parts.append(
                    torch.zeros(1, weights.geometry.vocab_size, device=weights.device, dtype=torch.float32)
                )
        return torch.cat(parts)

    def _drop(self, branch: Branch) -> None:
        self.session.free(self._mirrors.pop(branch).sequence)

    def _feed(self, work: "list[tuple[Branch, array[int]]]") -> Tensor:
        mirrors = [self._mirrors[branch] for branch, _ in work]
        results = self.session.forward(
            [(mirror.sequence, tokens.tolist()) for mirror, (_, tokens) in zip(mirrors, work, strict=True)]
        )
        for mirror, (branch, tokens), result in zip(mirrors, work, results, strict=True):
            mirror.fed.extend(tokens)
            if not result.finite:
                self._gone.add(branch)
        return torch.cat([result.logits for result in results])


def _common(fed: "array[int]", tokens: "array[int]") -> int:
    """Return the length of the common prefix, but leave at least one of `tokens` to compute."""
    most = min(len(fed), len(tokens) - 1)
    if fed[:most] == tokens[:most]:
        return most
    return next(i for i in range(most) if fed[i] != tokens[i])
