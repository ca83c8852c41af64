"""Beam search for one request: which branches go on, which are finished, which are returned."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

BeamEnd = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hypothesis:
    """A finished branch. `tokens` are the generated ones, with the end token if one ended it."""

    tokens: tuple[int, ...]
    score: float  # log-probability / len(tokens) ** length_penalty
    finish_reason: BeamEnd


@dataclass(frozen=True, kw_only=True, slots=True)
class _Beam:
    tokens: tuple[int, ...]
    logprob: float  # of all tokens together


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidate:
    parent: int  # index of the running beam
    beam: _Beam
    finish_reason: BeamEnd | None


class BeamSearch:
    """The decisions of beam search, without a model; the tokens are those of Transformers' `generate`.

    Each step orders the continuations of all running beams by log-probability. A continuation that ends
    is kept as a hypothesis if it is among the first `width`; the first `width` that do not end run on.
    The best `width` hypotheses by score are kept. The search is over when no running beam can do better
    than the worst of them, judged at its present length (or, with `early_stopping`, as soon as there
    are `width`), when `max_tokens` are reached, or when nothing can go on.

    Source: Wu et al. 2016, Google's Neural Machine Translation System, section 7.
    """

    def __init__(
        self,
        width: int,
        num_returned: int,
        *,
        length_penalty: float,
        early_stopping: bool,
        max_tokens: int,
        end_ids: Collection[int],
        min_tokens: int = 0,
    ) -> None:
        assert 1 <= num_returned <= width, f"{num_returned} of {width} beams can't be returned"
        self.width = width
        self._num_returned = num_returned
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens  # end tokens are left out before
        self._end_ids = frozenset(end_ids)
        self._running = [_Beam(tokens=(), logprob=0.0)]  # best first; the prompt alone at first
        self._finished: list[Hypothesis] = []  # best first
        self.is_done = False

    @property
    def num_candidates(self) -> int:
        """Likeliest tokens that a step needs of each beam: `width` are left without the end tokens."""
        return self.width * (1 + max(1, len(self._end_ids)))

    @property
    def num_running(self) -> int:
        """Beams that the next step needs candidates of; the first step has one."""
        return len(self._running)

    def step(self, candidates: Sequence[Sequence[tuple[float, int]]]) -> list[tuple[int, int]]:
        """Extend the beams; return those that run on as (parent's index, token), best first.

        Arguments:
            candidates: for each running beam, in the order the last step returned them, its
                `num_candidates` likeliest tokens as (log-probability, token).
        """
        assert not self.is_done, "the search is done"
        assert len(candidates) == len(self._running), (
            f"candidates of {len(candidates)} beams, but {len(self._running)} run"
        )
        best = self._continuations(candidates)
        for candidate in best[: self.width]:
            if candidate.finish_reason is not None:
                self._finished.append(self._hypothesis(candidate.beam, candidate.finish_reason))
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self._finished[self.width :]
        going_on = [c for c in best if c.finish_reason is None][: self.width]
        self._running = [c.beam for c in going_on]
        self.is_done = not self._can_improve()
        return [] if self.is_done else [(c.parent, c.beam.tokens[-1]) for c in going_on]

    def results(self) -> list[Hypothesis]:
        """The hypotheses to return, best first; fewer than asked for if too few could be finished."""
        return self._finished[: self._num_returned]

    def _continuations(self, candidates: Sequence[Sequence[tuple[float, int]]]) -> list[_Candidate]:
        """The likeliest continuations of all beams together, best first."""
        length = len(self._running[0].tokens) + 1
        barred = self._end_ids if length <= self._min_tokens else frozenset[int]()
        scored = [
            (self._running[parent].logprob + logprob, parent, token)
            for parent, tokens in enumerate(candidates)
            for logprob, token in tokens
            if logprob > -math.inf and token not in barred
        ]
        scored.sort(key=lambda entry: -entry[0])  # stable: of equals the earlier beam's goes first
        best = []
        for logprob, parent, token in scored[: self.num_candidates]:
            ends = token in self._end_ids
            reason: BeamEnd | None = "stop" if ends else "length" if length >= self._max_tokens else None
            beam = _Beam(tokens=(*self._running[parent].tokens, token), logprob=logprob)
            best.append(_Candidate(parent=parent, beam=beam, finish_reason=reason))
        return best

    def _can_improve(self) -> bool:
        if not self._running:
            return False
        if len(self._finished) < self.width:
            return True
        if self._early_stopping:
            return False
        best = self._running[0]
        return self._score(best.logprob, len(best.tokens)) > self._finished[-1].score

    def _hypothesis(self, beam: _Beam, reason: BeamEnd) -> Hypothesis:
        score = self._score(beam.logprob, len(beam.tokens))
        return Hypothesis(tokens=beam.tokens, score=score, finish_reason=reason)

    def _score(self, logprob: float, length: int) -> float:
        # The power is kept within what a float holds, at any length.
        return logprob / math.exp(max(-700.0, min(700.0, self._length_penalty * math.log(length))))
