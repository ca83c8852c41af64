"""Teacher-forced replay: what each KV format predicts along given answers, beside unquantized KV.

Tokens go through the path that serves requests: they are quantized into blocks, and attention reads these.
Every format reads a stretch's tokens once. Before a recorded answer, a fork of its sequence reads the answer
that unquantized KV gave itself, if there is one.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvq.blockmgr import Sequence as BlockSequence
from kvq.evals.divergence import Reference
from kvq.evals.side_by_side import chunk_size
from kvq.models import Model, Session
from kvq.traces.rendering import Answer, Stretch

_PREFILL = 512  # tokens of context in a step
_Pairs = Sequence[tuple[Session, BlockSequence]]


class Scores(NamedTuple):
    """Scores of one format along an answer, with one number per token."""

    kl: npt.NDArray[np.float64]  # nats, from unquantized KV
    top: npt.NDArray[np.int64]  # the most likely token
    same: npt.NDArray[np.bool_]  # the most likely token is that of unquantized KV


# An answer, its scores in all formats, the baseline first, and those along the baseline's own answer, if any
Scored = tuple[Answer, list[Scores], list[Scores]]


class Replay:
    """Sessions in all formats that read the same stretches."""

    def __init__(self, models: Sequence[Model], max_tokens: int) -> None:
        """`models`: one per format, the baseline first; `max_tokens`: of a stretch with any answer.

        Raises:
            OutOfMemory: the pools don't fit.
        """
        longest = min(max_tokens, models[0].prepared.max_context)
        self._size = chunk_size(models[0], longest)
        self._sessions = [one.session(max_tokens=longest, max_sequences=2) for one in models]

    def scores(  # D410: along the baseline's own answers, too
        self, stretch: Stretch, own: Mapping[int, Sequence[int]]
    ) -> list[Scored]:
        """Return the scores of every answer. `own`: the baseline's own answers, by message.

        Raises:
            RequestError: K or V are not finite.
        """
        pairs = [(session, session.new_sequence()) for session in self._sessions]
        found, done = list[Scored](), 0
        for answer in stretch.answers:
            last = answer.first - 1  # the token that predicts the answer's first
            _read(pairs, stretch.tokens[done:last])
            before, along = stretch.tokens[last], own.get(answer.message)
            mine = self._along_fork(pairs, [before, *along[:-1]]) if along else []
            recorded = _along(pairs, stretch.tokens[last : answer.end - 1], self._size)
            done = answer.end - 1
            found.append((answer, recorded, mine))
        for session, sequence in pairs:
            session.free(sequence)
        return found

    def _along_fork(self, pairs: _Pairs, ids: Sequence[int]) -> list[Scores]:
        forks = [(session, session.manager.fork(sequence)) for session, sequence in pairs]
        found = _along(forks, ids, self._size)
        for session, fork in forks:
            session.free(fork)
        return found


def _read(pairs: _Pairs, ids: Sequence[int]) -> None:
    for at in range(0, len(ids), _PREFILL):
        for session, sequence in pairs:
            session.forward([(sequence, list(ids[at : at + _PREFILL]))])[0].trusted_logits()


def _along(pairs: _Pairs, ids: Sequence[int], size: int) -> list[Scores]:
    """Append tokens to all sequences, and return each format's scores of what follows each token."""
    parts: list[list[Scores]] = [[] for _ in pairs]
    for at in range(0, len(ids), size):
        for i, (session, sequence) in enumerate(pairs):
            result = session.forward([(sequence, list(ids[at : at + size]))], all_rows=True)[0]
            log_probs = torch.log_softmax(result.trusted_logits(), dim=-1)  # [tokens, vocab]
            if i == 0:
                reference = Reference.of(log_probs)
            top = log_probs.argmax(-1)
            kl = (reference.log_probs - log_probs).mul_(reference.probs).sum(-1).double()
            parts[i].append(
                Scores(kl.cpu().numpy(), top.cpu().numpy(), (top == reference.top1).cpu().numpy())
            )
    return [Scores(*(np.concatenate(column) for column in zip(*some, strict=True))) for some in parts]
