"""Sessions that run alternately over the same windows, chunk by chunk.

In every session, tokens are first quantized into blocks, and attention then reads these blocks. All sessions
process a chunk before any session processes the next chunk, so only one chunk of the first session's logits
is kept, and slowdowns of the machine affect the times of all sessions.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvq.formats import KVRecipe
from kvq.models import Model, Session

# D34: 64 MiB of logits at a time
_LOGITS_BYTES = 64 << 20  # of one chunk
_AT_ONCE = 12  # number of recipes that share a run of the baseline; each has a pool for one window


class Marked(NamedTuple):
    """Window whose tokens count more or less where they are predicted."""

    ids: list[int]
    weights: list[float]


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Result of one session on one chunk of one window."""

    session: int
    window: int
    at: int  # index of the chunk's first token in its window
    log_probs: Tensor  # fp32 [tokens, vocab], after each token
    seconds: float  # of the forward pass


def chunk_size(model: Model, context: int) -> int:
    """Return how many tokens, up to `context`, have 64 MiB of logits; the peak is about five times that."""
    return max(1, min(context, _LOGITS_BYTES // (4 * model.geometry.vocab_size)))


def side_by_side(sessions: Sequence[Session], windows: Sequence[list[int]], size: int) -> Iterator[Chunk]:
    """Yield the results for chunks of `size` tokens, window by window, running each chunk in all sessions.

    Raises:
        RequestError: K or V are not finite.
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
    windows: Sequence[list[int] | Marked],
    *,
    firsts: Sequence[int] = (),
    progress: Callable[[int], None] = lambda done: None,
    keep: Callable[[list[float]], object] = lambda found: None,
) -> list[float]:
    """Return each recipe's mean KL divergence from unquantized KV, in nats per token of `windows`, which are
    all marked, or none is.

    The baseline is the weights' dtype. `firsts`: for each recipe except the first, the first layer that
    differs from the first recipe; earlier layers are computed once for several recipes. `progress` receives
    the number of recipes' worth of finished work, and `keep` the divergences of finished recipes.

    Raises:
        RequestError: K or V are not finite.
        ConfigError: a recipe does not fit the model.
    """
    found: list[float] = []

    def tell(done: int) -> None:
        progress(min(len(found) + done, len(recipes)))

    again = 1 if firsts else 0  # every run begins with the first recipe
    for at in range(again, len(recipes), _AT_ONCE):
        some, begins = recipes[at : at + _AT_ONCE], firsts[at - again : at - again + _AT_ONCE]
        costs = _together(model, [*recipes[:again], *some], begins, windows, tell)
        found += costs[again:] if found else costs
        keep(found)
    return found


def _together(
    model: Model,
    recipes: Sequence[KVRecipe],
    firsts: Sequence[int],
    windows: Sequence[list[int] | Marked],
    progress: Callable[[int], None],
) -> list[float]:
    marked = [one for one in windows if isinstance(one, Marked)]
    texts = [one.ids if isinstance(one, Marked) else one for one in windows]
    context = max(map(len, texts))
    models = [model.with_kv("auto"), *map(model.with_kv, recipes)]
    sessions = [one.session(max_tokens=context) for one in models]
    inputs: list[Tensor] = []
    if firsts:
        sessions[1].shared = inputs, 0
    for session, first in zip(sessions[2:], firsts, strict=False):
        session.shared = (inputs, first) if first else None
    totals = torch.zeros(len(recipes), dtype=torch.float64)
    size, tokens = chunk_size(model, context), sum(map(len, texts))
    weights = [torch.tensor([*one.weights[1:], 0.0], device=model.weights.device) for one in marked]
    steps = len(sessions) * sum(-(-len(ids) // size) for ids in texts)
    for step, chunk in enumerate(side_by_side(sessions, texts, size), start=1):
        if chunk.session == 0:
            reference, probs = chunk.log_probs, chunk.log_probs.exp()
        else:
            kl = (reference - chunk.log_probs).mul_(probs)
            if weights:
                kl *= weights[chunk.window][chunk.at : chunk.at + len(kl), None]
            totals[chunk.session - 1] += float(kl.sum())
        progress(len(recipes) * step // steps)
    return (totals / (sum(float(one.sum()) for one in weights) if weights else tokens)).tolist()


def one_by_one(session: Session, windows: Sequence[list[int]]) -> Iterator[int]:
    """Run windows through a session with an instrumented cache, yielding the number of finished windows.

    Raises:
        RequestError: K or V are not finite.
    """
    for done, ids in enumerate(windows, start=1):
        sequence = session.new_sequence()
        session.forward([(sequence, ids)])[0].trusted_logits()
        session.free(sequence)
        yield done
