"""Head contexts: K and V of a draft head for every branch, in blocks of its own, in the model's own type.

The head reads the model's hidden states one by one. State number p belongs to the token at p and all before
it; the head reads it together with the token at p + 1. States of tokens from the prefix cache were never
computed, so a context may begin anywhere, which only makes its drafts worse.
"""

from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from kvq.blockmgr import BlockManager, Sequence
from kvq.cache.backend import CacheBackend
from kvq.engine.device.transfers import upload
from kvq.kernels import SequenceBatch
from kvq.models.loading.prepared import make_cache
from kvq.models.mtp import MtpHead
from kvq.models.parts.step import PackedStep
from kvq.models.run.packing import padded, positions_of


@dataclass(slots=True, eq=False)
class Context:
    """Context of one branch: states from `start` on were read, later ones wait."""

    sequence: Sequence
    start: int
    waiting: list[Tensor] = field(default_factory=list)  # states [rows, hidden_size]
    newest: Tensor | None = None  # [hidden_size]: the head's own state after the last one that it read

    @property
    def read(self) -> int:
        """Number of the first state that was not read."""
        return self.start + self.sequence.length

    @property
    def end(self) -> int:
        """Number of the first state that is missing."""
        return self.read + sum(map(len, self.waiting))

    def add(self, states: Tensor, first: int) -> None:
        """Let states wait from number `first` on, in place of others; `first` is `end` at most."""
        states = states[max(0, self.read - first) :]
        if not len(states):
            return
        kept = self._first(max(0, first - self.read))
        self.waiting = [*kept, states.clone()]  # the next step overwrites its memory

    def take(self, count: int) -> Tensor:
        """Take out the first `count` waiting states, at least one: [count, hidden_size]."""
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


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """States that the head reads next, and the token after each of them."""

    context: Context
    states: Tensor  # [rows, hidden_size]
    tokens: list[int]  # [rows]


class HeadCache:
    """The draft head over pools of a fixed size."""

    def __init__(self, head: MtpHead, tokens: int) -> None:
        """Make room for `tokens` tokens of all branches together.

        Raises:
            OutOfMemory: they don't fit.
        """
        layout = head.layout
        num_blocks = [-(-tokens // layout.block_size)] * len(layout.groups)
        self.manager = BlockManager(num_blocks=num_blocks, block_size=layout.block_size, **layout.holding)
        self._cache: CacheBackend = make_cache(head.prepared, layout, num_blocks=num_blocks)
        self._head = head

    def begin(self, start: int) -> Context:
        """Return a context that reads from state `start` on."""
        return Context(self.manager.new_sequence(), start)

    def fork(self, context: Context) -> Context:
        """Return a copy that shares the blocks."""
        twin = self.manager.fork(context.sequence)
        return Context(twin, context.start, list(context.waiting), context.newest)

    def restart(self, context: Context) -> None:
        """Drop the states that were read; waiting ones stay."""
        context.start = context.read
        self.manager.free(context.sequence)
        context.sequence = self.manager.new_sequence()

    def have_room(self, work: list[tuple[Context, int]]) -> bool:
        """True if each context can read its number of states. Changes nothing."""
        return self.manager.can_append([(context.sequence, rows) for context, rows in work])

    @torch.inference_mode()
    def read(self, work: list[Reading]) -> list[Tensor | None]:
        """Return the head's state after each reading, [hidden_size]; None if K or V is not finite.

        There has to be room.
        """
        sequences, counts = [one.context.sequence for one in work], [len(one.tokens) for one in work]
        slots = self.manager.append(list(zip(sequences, counts, strict=True)))
        self._cache.carry_out(self.manager.take_orders())
        device, geometry = self._head.prepared.device, self._head.geometry
        lens = [sequence.length for sequence in sequences]
        ends = [one.context.read + 1 for one in work]
        positions = padded(positions_of(counts, ends), sum(counts), device)
        step = PackedStep(
            cache=self._cache,
            geometry=geometry,
            batches=(
                SequenceBatch.of(
                    [sequence.tables[0] for sequence in sequences], slots[0], counts, lens, device
                ),
            ),
            bad_tokens=torch.zeros(sum(counts), dtype=torch.bool, device=device),
            positions=positions,
        )
        tokens = upload([token for one in work for token in one.tokens], device)
        made = self._head.hidden(tokens, positions, torch.cat([one.states for one in work]), step)
        bad = [bool(part.any()) for part in step.bad_tokens.split(counts)]
        last = made[upload([end - 1 for end in accumulate(counts)], device)]
        return [None if broken else row for row, broken in zip(last, bad, strict=True)]

    def drop(self, context: Context) -> None:
        """End a context and zero its blocks, which may hold values that are not finite."""
        self.manager.scrub(context.sequence)
        self.free(context)

    def free(self, context: Context) -> None:
        """End a context."""
        self.manager.free(context.sequence)

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        """Return logits [rows, vocab] by the model's head."""
        return self._head.logits(states)
