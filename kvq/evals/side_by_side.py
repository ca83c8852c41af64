"""Several sessions over the same windows, chunk by chunk, so that what is compared is measured together.

Every window's tokens go through a session's own write-then-read path: quantized into blocks first, attended
from there. All sessions see the same chunk before any sees the next, so that only one chunk of the first
one's logits has to be kept, and their times are taken side by side.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvq.formats import KVRecipe
from kvq.models import Model, Session

_LOGITS_BYTES = 64 << 20  # of one chunk
_AT_ONCE = 12  # recipes that share a run of the baseline; each has a pool of one window


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """What one session made of one chunk of one window."""

    session: int
    window: int
    at: int  # first token of the chunk in its window
    log_probs: Tensor  # fp32 [tokens, vocab]: after each of its tokens
    seconds: float  # of the forward pass


def chunk_size(model: Model, context: int) -> int:
    """Tokens whose logits take 64 MiB, `context` at most: some five times that is held at once."""
    return max(1, min(context, _LOGITS_BYTES // (4 * model.geometry.vocab_size)))


def side_by_side(sessions: Sequence[Session], windows: Sequence[list[int]], size: int) -> Iterator[Chunk]:
    """Chunks of `size` tokens, those of all sessions one after the other, window after window.

    Raises:
        RequestError: K or V that are not finite.
    """
    for window, ids in enumerate(windows):
        sequences = [session.new_sequence() for session in sessions]
        for at in range(0, len(ids), size):
            for i, (session, sequence) in enumerate(zip(sessions, sequences, strict=True)):
                began = time.perf_counter()
                result = session.forward([(sequence, ids[at : at + size])], all_rows=True)[0]
                seconds = time.perf_counter() - began
                yield Chunk(i, window, at, torch.log_softmax(result.trusted_logits(), dim=-1), seconds)
        for session, sequence in zip(sessions, sequences, strict=True):
            session.free(sequence)


def mean_divergences(
    model: Model,
    recipes: Sequence[KVRecipe],
    windows: Sequence[list[int]],
    *,
    progress: Callable[[int], None] = lambda done: None,
    keep: Callable[[list[float]], object] = lambda found: None,
) -> list[float]:
    """Mean KL divergence of recipes from unquantized KV, in nats per token, over all tokens of `windows`.

    The baseline is the weights' own type. `progress` hears for how many recipes' worth of time it has run,
    `keep` the divergences of those that are done.

    Raises:
        RequestError: K or V that are not finite.
        ConfigError: a recipe that does not fit the model.
    """
    found: list[float] = []

    def tell(done: int) -> None:
        progress(len(found) + done)

    for at in range(0, len(recipes), _AT_ONCE):
        found += _together(model, recipes[at : at + _AT_ONCE], windows, tell)
        keep(found)
    return found


def _together(
    model: Model,
    recipes: Sequence[KVRecipe],
    windows: Sequence[list[int]],
    progress: Callable[[int], None],
) -> list[float]:
    context = max(map(len, windows))
    models = [model.with_kv("auto"), *map(model.with_kv, recipes)]
    sessions = [one.session(max_tokens=context) for one in models]
    totals = torch.zeros(len(recipes), dtype=torch.float64)
    size, tokens = chunk_size(model, context), sum(map(len, windows))
    steps = len(sessions) * sum(-(-len(ids) // size) for ids in windows)
    for step, chunk in enumerate(side_by_side(sessions, windows, size), start=1):
        if chunk.session == 0:
            reference, weights = chunk.log_probs, chunk.log_probs.exp()
        else:
            totals[chunk.session - 1] += float((reference - chunk.log_probs).mul_(weights).sum())
        progress(len(recipes) * step // steps)
    return (totals / tokens).tolist()


def one_by_one(session: Session, windows: Sequence[list[int]]) -> Iterator[int]:
    """Run windows through a session whose cache is watched; yields how many are done.

    Raises:
        RequestError: K or V that are not finite.
    """
    for done, ids in enumerate(windows, start=1):
        sequence = session.new_sequence()
        session.forward([(sequence, ids)])[0].trusted_logits()
        session.free(sequence)
        yield done
