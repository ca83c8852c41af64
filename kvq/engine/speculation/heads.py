"""Draft heads: drafts by the multi-token-prediction layer of a checkpoint.

The layer reads the model's hidden state of a token together with the next token, and predicts the token after
that. Further drafts use its own state, as in vLLM and in DeepSeek-V3's own serving.
"""

import torch
from torch import Tensor

from kvq.engine.device.runner import StepOutput
from kvq.engine.requests.request_state import Job, as_job
from kvq.engine.sampling.choose import Chooser
from kvq.engine.sampling.sampler import Drafted
from kvq.engine.speculation.drafter import Drafter, Growing
from kvq.engine.speculation.head_contexts import Context, HeadCache, Reading
from kvq.errors import ConfigError, ModelError
from kvq.models.mtp import MtpHead
from kvq.scheduler import Branch, StepPlan

_WAITING = 256  # states of a branch that wait for the next draft at most; more are read at once


class Heads(Drafter):
    """Follows every branch with a context of its own in the head's cache."""

    def __init__(self, chooser: Chooser, head: MtpHead, *, tokens: int) -> None:
        """`tokens`: room of the head's cache, for all branches together.

        Raises:
            ConfigError: attention of the head that kvq doesn't run.
            OutOfMemory: its K and V don't fit.
        """
        super().__init__(chooser)
        self._hidden_size = head.geometry.hidden_size
        self._dtype, self._device = head.prepared.dtype, head.prepared.device
        self._cache = HeadCache(head, tokens)
        self._contexts: dict[Branch, Context] = {}
        self._newest: dict[Branch, Tensor] = {}  # [hidden_size], of the drafts in the making
        self._try()

    def observe(self, plan: StepPlan, output: StepOutput) -> None:
        """Take the states of every branch. Those of prompts are read here, so that few wait."""
        if output.hidden is None:
            return
        crowded, forking = [], []
        parts = output.hidden.split(plan.counts)
        for branch, states, end, samples in zip(plan.branches, parts, plan.ends, plan.samples, strict=True):
            if branch.is_done or as_job(branch.request).beams is not None:
                continue
            context = self._context(branch, end - len(states))
            context.add(states, end - len(states))
            if samples and not branch.request.is_forked:
                forking.append(branch)
            elif context.end - context.read > _WAITING:
                crowded.append(branch)
        if crowded or forking:
            self._read([*crowded, *forking])
        for branch in forking:
            self._fork(branch)

    def most(self, branch: Branch, job: Job, limit: int) -> int:
        """Return 0 for a branch whose last state is missing, or without room; else `limit`."""
        context = self._contexts.get(branch)
        if context is None or context.end < len(branch.tokens) - 1:
            return 0
        rows = _readable(context, branch) + limit - 1
        if not self._cache.have_room([(context, rows)]):
            self._cache.restart(context)
        return limit if self._cache.have_room([(context, rows)]) else 0

    def propose(self, plan: StepPlan) -> dict[int, list[Drafted]]:
        """Draft, then drop the states of drafts from the head's cache."""
        self._newest = {}
        drafting = [branch for branch, count in zip(plan.branches, plan.drafts, strict=True) if count]
        self._read(drafting)
        contexts = {branch: self._contexts[branch] for branch in drafting if branch in self._contexts}
        lengths = {branch: context.sequence.length for branch, context in contexts.items()}
        try:
            return super().propose(plan)
        finally:
            for branch, context in contexts.items():
                if branch in self._contexts:
                    self._cache.manager.truncate(context.sequence, lengths[branch])

    def logits(self, plan: StepPlan, growing: list[Growing]) -> Tensor:
        """Return logits of the head: from the model's state first, then from its own state and the drafts."""
        drafts = [one for one in growing if one.drafts]
        if drafts:
            self._read_drafts(drafts)
        else:
            self._newest = {
                one.branch: context.newest
                for one in growing
                if (context := self._contexts.get(one.branch)) is not None and context.newest is not None
            }
        nothing = torch.zeros(self._hidden_size, dtype=self._dtype, device=self._device)
        return self._cache.logits(torch.stack([self._newest.get(one.branch, nothing) for one in growing]))

    def forget(self, branch: Branch, job: Job) -> None:
        """Free the blocks of a branch that ended."""
        if (context := self._contexts.pop(branch, None)) is not None:
            self._cache.free(context)

    def _context(self, branch: Branch, first: int) -> Context:
        """Return a branch's context, which has all states before `first`, or a new one that begins there."""
        context = self._contexts.get(branch)
        if context is not None and context.end < first:
            self._cache.free(context)
            context = None
        if context is None:
            context = self._contexts[branch] = self._cache.begin(first)
        return context

    def _fork(self, branch: Branch) -> None:
        """Start the contexts of the request's other branches from this one."""
        context = self._contexts.get(branch)
        for other in branch.request.branches:
            if context is not None and other not in self._contexts:
                self._contexts[other] = self._cache.fork(context)

    def _read(self, branches: list[Branch]) -> None:
        """Read all states whose next tokens are known."""
        rows = {
            branch: count
            for branch in branches
            if (context := self._contexts.get(branch)) is not None and (count := _readable(context, branch))
        }
        work: dict[Branch, Reading] = {}
        for branch in self._make_room(rows):
            context, count = self._contexts[branch], rows[branch]
            tokens = branch.tokens[context.read + 1 :][:count].tolist()
            work[branch] = Reading(context, context.take(count), tokens)
        for branch, made in self._run(work).items():
            context = self._contexts[branch]
            context.newest = made.clone()
            self._cache.manager.commit(context.sequence)

    def _read_drafts(self, growing: list[Growing]) -> None:
        """Read the head's last state with the newest draft, of each branch that has both."""
        rows = {one.branch: 1 for one in growing if one.branch in self._contexts & self._newest.keys()}
        tokens = {one.branch: one.drafts[-1].token for one in growing}
        work = {
            branch: Reading(self._contexts[branch], self._newest[branch][None], [tokens[branch]])
            for branch in self._make_room(rows)
        }
        self._newest |= self._run(work)

    def _make_room(self, rows: dict[Branch, int]) -> list[Branch]:
        """Return the branches that can read their states; contexts that get no blocks end."""
        if self._cache.have_room([(self._contexts[branch], count) for branch, count in rows.items()]):
            return list(rows)
        fitting: list[tuple[Context, int]] = []
        kept = []
        for branch, count in rows.items():
            context = self._contexts[branch]
            if self._cache.have_room([*fitting, (context, count)]):
                fitting.append((context, count))
                kept.append(branch)
            else:
                self._cache.free(self._contexts.pop(branch))
        return kept

    def _run(self, work: dict[Branch, Reading]) -> dict[Branch, Tensor]:
        """Return the head's state after each branch; contexts with values that are not finite end."""
        if not work:
            return {}
        try:
            made = self._cache.read(list(work.values()))
        except BaseException:
            for branch in work:
                self._cache.free(self._contexts.pop(branch))
            raise
        found = {branch: row for branch, row in zip(work, made, strict=True) if row is not None}
        for branch in work.keys() - found.keys():
            self._cache.drop(self._contexts.pop(branch))
            self._newest.pop(branch, None)
        return found

    def _try(self) -> None:
        """Raise ConfigError unless kvq's attention runs the head."""
        context = self._cache.begin(0)
        states = torch.zeros(3, self._hidden_size, dtype=self._dtype, device=self._device)
        try:
            self._cache.read([Reading(context, states, [0, 1, 2])])
        except ModelError as error:
            raise ConfigError(
                f"kvq does not run this model's multi-token-prediction layer: {error}; take the method "
                f"ngram, self or draft"
            ) from error
        self._cache.free(context)


def _readable(context: Context, branch: Branch) -> int:
    """Return how many waiting states have a known next token; those of wrong drafts have none."""
    return max(0, min(context.end, len(branch.tokens) - 1) - context.read)
