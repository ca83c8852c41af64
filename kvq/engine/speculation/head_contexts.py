"""Head context: a draft head's K and V for one branch, and the model states that the head has not read yet.

The head reads the model's hidden states one by one. State p covers the tokens up to position p; the head
reads it together with the token at p + 1. Tokens from the prefix cache have no computed states, so a context
may begin at any position, which only makes its drafts worse.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvq.blockmgr import Sequence


@dataclass(slots=True, eq=False)
class Context:
    """Context of one branch. States from `start` on have been read; later states are waiting to be read."""

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
