"""What a head has read of every branch: K and V in blocks of its own, in the model's own type.

It reads the model's hidden states one by one. State number p is what the model made of the token at p and
all before it; the head reads it together with the token at p + 1. States of tokens that came from the prefix
cache were never computed, so what a head has read may begin anywhere: that only makes it guess worse.
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
    """Of one branch: states from `start` on were read, those that follow wait."""

    sequence: Sequence
    start: int
    waiting: list[Tensor] = field(default_factory=list)  # states [rows, hidden_size]
    newest: Tensor | None = None  # [hidden_size]: what the head made of the last state that it read

    @property
    def read(self) -> int:
        """The number of the first state that was not read."""
        return self.start + self.sequence.length

    @property
    def end(self) -> int:
        """The number of the first state that is not here."""
        return self.read + sum(map(len, self.waiting))

    def add(self, states: Tensor, first: int) -> None:
        """Let states wait, from number `first` on, none of which are beyond the next: they replace others."""
        states = states[max(0, self.read - first) :]
        if not len(states):
            return
        kept = self._first(max(0, first - self.read))
        self.waiting = [*kept, states.clone()]  # the step's own memory is another's soon

    def take(self, count: int) -> Tensor:
        """The first states that wait, [count, hidden_size], which is some; they wait no longer."""
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
    """States that the head reads next, and the tokens behind those that they were made of."""

    context: Context
    states: Tensor  # [rows, hidden_size]
    tokens: list[int]  # [rows]


class HeadCache:
    """The head over pools of a fixed size."""

    def __init__(self, head: MtpHead, tokens: int) -> None:
        """With room for so many tokens, however they are shared out among branches.

        Raises:
            OutOfMemory: they don't fit.
        """
        layout = head.layout
        num_blocks = [-(-tokens // layout.block_size)] * len(layout.groups)
        self.manager = BlockManager(num_blocks=num_blocks, block_size=layout.block_size, **layout.holding)
        self._cache: CacheBackend = make_cache(head.prepared, layout, num_blocks=num_blocks)
        self._head = head

    def begin(self, start: int) -> Context:
        """A context that will read from a state on."""
        return Context(self.manager.new_sequence(), start)

    def fork(self, context: Context) -> Context:
        """One more of the same."""
        twin = self.manager.fork(context.sequence)
        return Context(twin, context.start, list(context.waiting), context.newest)

    def restart(self, context: Context) -> None:
        """Forget what was read, but for the states that wait."""
        context.start = context.read
        self.manager.free(context.sequence)
        context.sequence = self.manager.new_sequence()

    def have_room(self, work: list[tuple[Context, int]]) -> bool:
        """True if that many states can be read by each. Changes nothing."""
        return self.manager.can_append([(context.sequence, rows) for context, rows in work])

    @torch.inference_mode()
    def read(self, work: list[Reading]) -> list[Tensor | None]:
        """What the head makes of each one's last state, [hidden_size]; None where K or V is not finite.

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
        """End a context. Its blocks are zeroed: some may hold what is not finite."""
        self.manager.scrub(context.sequence)
        self.free(context)

    def free(self, context: Context) -> None:
        """End a context."""
        self.manager.free(context.sequence)

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        """[rows, vocab], by the model's head."""
        return self._head.logits(states)
