"""Draft heads: drafts from the multi-token-prediction layer of a checkpoint.

The layer reads the model's hidden state for a token together with the next token, and predicts the token
after the next. Further drafts use the layer's own state, as in vLLM and in DeepSeek-V3's own serving. The
layer's K and V have separate blocks, in the model's own dtype.
"""

from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from kvq.blockmgr import BlockManager, Sequence
from kvq.engine.device.runner import StepOutput
from kvq.engine.device.transfers import upload
from kvq.engine.requests.request_state import Job, as_job
from kvq.engine.sampling.choose import Chooser
from kvq.engine.sampling.sampler import Drafted
from kvq.engine.speculation.drafter import Drafter, Growing
from kvq.errors import ConfigError, ModelError
from kvq.kernels import SequenceBatch
from kvq.models.loading.prepared import make_cache
from kvq.models.mtp import MtpHead
from kvq.models.parts.step import PackedStep
from kvq.models.run.packing import padded, positions_of
from kvq.scheduler import Branch, StepPlan

_WAITING = 256  # maximum waiting states of a branch until the next draft; more are read immediately


@dataclass(slots=True, eq=False)
class _Context:
    """K and V of the head for one branch, and the model states that the head has not read yet.

    The head reads the states one by one. State p covers the tokens up to position p; the head reads it with
    the token at p + 1. Tokens from the prefix cache have no computed states, so a context may begin at any
    position, which only makes its drafts worse. States from `start` on have been read; later ones wait.
    """

    sequence: Sequence
    start: int
    waiting: list[Tensor] = field(default_factory=list)  # states [rows, hidden_size]
    newest: Tensor | None = None  # [hidden_size]: the head's own state after the last state that it read

    @property
    def read(self) -> int:
        """Position of the first state that has not been read."""
        return self.start + self.sequence.length

    @property
    def end(self) -> int:
        """Position of the first state that has not been received."""
        return self.read + sum(map(len, self.waiting))

    def add(self, states: Tensor, first: int) -> None:
        """Add waiting states from position `first` on, replacing any later ones; `first` is at most `end`."""
        states = states[max(0, self.read - first) :]
        if not len(states):
            return
        kept = self._first(max(0, first - self.read))
        self.waiting = [*kept, states.clone()]  # the next step overwrites the memory

    def take(self, count: int) -> Tensor:
        """Remove and return the first `count` waiting states, at least one: [count, hidden_size]."""
        joined = torch.cat(self.waiting)
        self.waiting = [joined[count:]] if count < len(joined) else []
        return joined[:count]

    def _first(self, count: int) -> list[Tensor]:
        kept = []
        for part in self.waiting:
            if count <= 0:
                break
            kept.append(part[:count])
            count -= len(part)
        return kept


_Reading = tuple[
    _Context, Tensor, list[int]
]  # states [rows, hidden_size] that will be read, and the next token of each


class Heads(Drafter):
    """Drafter with a draft head. Each branch has a separate context in the head's cache."""

    def __init__(self, chooser: Chooser, head: MtpHead, *, tokens: int) -> None:
        """`tokens`: capacity of the head's cache, for all branches together.

        Raises:
            ConfigError: kvq doesn't support the head's attention.
            OutOfMemory: the head's K and V don't fit in memory.
        """
        super().__init__(chooser)
        layout = head.layout
        num_blocks = [-(-tokens // layout.block_size)] * len(layout.groups)
        self._manager = BlockManager(num_blocks=num_blocks, block_size=layout.block_size, **layout.holding)
        self._cache = make_cache(head.prepared, layout, num_blocks=num_blocks)
        self._head = head
        self._hidden_size = head.geometry.hidden_size
        self._dtype, self._device = head.prepared.dtype, head.prepared.device
        self._contexts: dict[Branch, _Context] = {}
        self._newest: dict[Branch, Tensor] = {}  # [hidden_size], for the drafts in progress
        self._try()

    def observe(self, plan: StepPlan, output: StepOutput) -> None:
        """Receive every branch's states. Prompt states are read immediately, so that few have to wait."""
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
            self._share(branch)

    def most(self, branch: Branch, job: Job, limit: int) -> int:
        """Return `limit`, or 0 for a branch whose last state is missing or that has no room."""
        context = self._contexts.get(branch)
        if context is None or context.end < len(branch.tokens) - 1:
            return 0
        rows = _readable(context, branch) + limit - 1
        if not self._have_room([(context, rows)]):  # drop the states that were read; waiting ones stay
            context.start = context.read
            self._manager.free(context.sequence)
            context.sequence = self._manager.new_sequence()
        return limit if self._have_room([(context, rows)]) else 0

    def propose(self, plan: StepPlan) -> dict[int, list[Drafted]]:
        """Make the drafts, then remove their states from the head's cache."""
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
                    self._manager.truncate(context.sequence, lengths[branch])

    def logits(self, plan: StepPlan, growing: list[Growing]) -> Tensor:
        """Return the head's logits: first from the model's state, then from the head's state and drafts."""
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
        with torch.inference_mode():
            return self._head.logits(torch.stack([self._newest.get(one.branch, nothing) for one in growing]))

    def forget(self, branch: Branch, job: Job) -> None:
        """Free the blocks of an ended branch."""
        if (context := self._contexts.pop(branch, None)) is not None:
            self._manager.free(context.sequence)

    def _context(self, branch: Branch, first: int) -> _Context:
        """Return the branch's context if it has all states before `first`, or a new one starting there."""
        context = self._contexts.get(branch)
        if context is not None and context.end < first:
            self._manager.free(context.sequence)
            context = None
        if context is None:
            context = self._contexts[branch] = self._begin(first)
        return context

    def _begin(self, start: int) -> _Context:
        return _Context(self._manager.new_sequence(), start)

    def _fork(self, context: _Context) -> _Context:
        """Return a copy of a context; the copy shares the context's blocks."""
        twin = self._manager.fork(context.sequence)
        return _Context(twin, context.start, list(context.waiting), context.newest)

    def _share(self, branch: Branch) -> None:
        """Start the contexts of the request's other branches from the context of `branch`."""
        context = self._contexts.get(branch)
        for other in branch.request.branches:
            if context is not None and other not in self._contexts:
                self._contexts[other] = self._fork(context)

    def _read(self, branches: list[Branch]) -> None:
        """Read all states whose next token is known."""
        rows = {
            branch: count
            for branch in branches
            if (context := self._contexts.get(branch)) is not None and (count := _readable(context, branch))
        }
        work: dict[Branch, _Reading] = {}
        for branch in self._make_room(rows):
            context, count = self._contexts[branch], rows[branch]
            tokens = branch.tokens[context.read + 1 :][:count].tolist()
            work[branch] = context, context.take(count), tokens
        for branch, made in self._run(work).items():
            context = self._contexts[branch]
            context.newest = made.clone()
            self._manager.commit(context.sequence)

    def _read_drafts(self, growing: list[Growing]) -> None:
        """Read the head's last state together with the newest draft, for each branch that has both."""
        rows = {one.branch: 1 for one in growing if one.branch in self._contexts & self._newest.keys()}
        tokens = {one.branch: one.drafts[-1].token for one in growing}
        work = {
            branch: (self._contexts[branch], self._newest[branch][None], [tokens[branch]])
            for branch in self._make_room(rows)
        }
        self._newest |= self._run(work)

    def _make_room(self, rows: dict[Branch, int]) -> list[Branch]:
        """Allocate blocks and return the branches that can read their states; drop contexts without room."""
        if self._have_room([(self._contexts[branch], count) for branch, count in rows.items()]):
            return list(rows)
        fitting: list[tuple[_Context, int]] = []
        kept = []
        for branch, count in rows.items():
            context = self._contexts[branch]
            if self._have_room([*fitting, (context, count)]):
                fitting.append((context, count))
                kept.append(branch)
            else:
                self._manager.free(self._contexts.pop(branch).sequence)
        return kept

    def _have_room(self, work: list[tuple[_Context, int]]) -> bool:
        return self._manager.can_append([(context.sequence, rows) for context, rows in work])

    def _run(self, work: dict[Branch, _Reading]) -> dict[Branch, Tensor]:
        """Return the head's state for each branch, and drop contexts with non-finite values."""
        if not work:
            return {}
        try:
            made = self._state_after(list(work.values()))
        except BaseException:
            for branch in work:
                self._manager.free(self._contexts.pop(branch).sequence)
            raise
        found = {branch: row for branch, row in zip(work, made, strict=True) if row is not None}
        for branch in work.keys() - found.keys():
            broken = self._contexts.pop(branch).sequence
            self._manager.scrub(broken)  # its blocks may contain values that are not finite
            self._manager.free(broken)
            self._newest.pop(branch, None)
        return found

    @torch.inference_mode()
    def _state_after(self, work: list[_Reading]) -> list[Tensor | None]:
        """Return the head's state after each reading, [hidden_size], or None if K or V is not finite.

        The caller must have allocated the blocks.
        """
        sequences, counts = [one.sequence for one, _, _ in work], [len(tokens) for _, _, tokens in work]
        slots = self._manager.append(list(zip(sequences, counts, strict=True)))
        self._cache.carry_out(self._manager.take_orders())
        device, lens = self._device, [sequence.length for sequence in sequences]
        ends = [context.read + 1 for context, _, _ in work]
        positions = padded(positions_of(counts, ends), sum(counts), device)
        tables = [sequence.tables[0] for sequence in sequences]
        step = PackedStep(
            cache=self._cache,
            geometry=self._head.geometry,
            batches=(SequenceBatch.of(tables, slots[0], counts, lens, device),),
            bad_tokens=torch.zeros(sum(counts), dtype=torch.bool, device=device),
            positions=positions,
        )
        tokens = upload([token for _, _, own in work for token in own], device)
        made = self._head.hidden(tokens, positions, torch.cat([states for _, states, _ in work]), step)
        bad = [bool(part.any()) for part in step.bad_tokens.split(counts)]
        last = made[upload([end - 1 for end in accumulate(counts)], device)]
        return [None if broken else row for row, broken in zip(last, bad, strict=True)]

    def _try(self) -> None:
        """Raise ConfigError if kvq's attention can't run the head."""
        context = self._begin(0)
        states = torch.zeros(3, self._hidden_size, dtype=self._dtype, device=self._device)
        try:
            self._state_after([(context, states, [0, 1, 2])])
        except ModelError as error:
            raise ConfigError(
                f"kvq does not run this model's multi-token-prediction layer: {error}; take the method "
                f"ngram, self or draft"
            ) from error
        self._manager.free(context.sequence)


def _readable(context: _Context, branch: Branch) -> int:
    """Return how many waiting states have a known next token; states of rejected drafts have none."""
    return max(0, min(context.end, len(branch.tokens) - 1) - context.read)
