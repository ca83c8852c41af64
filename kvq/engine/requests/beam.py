"""Beam search of one request: selects the beams to continue, to finish and to return."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvq.engine.params import SamplingParams
from kvq.engine.requests.outputs import FinishReason


@dataclass(frozen=True, slots=True)
class Beam:
    """Beam: the tokens generated so far, including the end token if the beam finished with one."""

    parent: int  # index of the beam that it continues
    tokens: tuple[int, ...]
    logprob: float  # of all tokens together
    finish_reason: FinishReason | None = None  # None while it is running
    score: float = 0.0  # of a finished beam: logprob / len(tokens) ** length_penalty


class BeamSearch:
    """Decision logic of beam search, without a model. Results equal those of Transformers' `generate`.

    Each step orders the continuations of all running beams by log-probability. A continuation that ends is
    kept if it is among the first `width`; of those that do not end, the first `width` continue. Of all
    finished beams, the `width` with the highest scores are kept. The search ends when no running beam can
    beat the worst of these at its current length (with `early_stopping`, as soon as `width` beams are
    finished), when `max_tokens` is reached, or when no beam can continue.

    Source: Wu et al. 2016, Google's Neural Machine Translation System, section 7.
    """

    def __init__(self, params: SamplingParams, *, max_tokens: int, end_ids: Collection[int]) -> None:
        assert params.beam_width is not None, "a search has a width"
        self.width = params.beam_width
        self._params = params
        self._max_tokens = max_tokens
        self._end_ids = frozenset(end_ids)
        self._running = [Beam(0, (), 0.0)]  # best first; before the first step, only the prompt
        self._finished: list[Beam] = []  # best first
        self.is_done = False

    @property
    def num_candidates(self) -> int:
        """Number of most likely tokens needed per beam, so that at least `width` of them don't end it."""
        return self.width * (1 + max(1, len(self._end_ids)))

    @property
    def num_running(self) -> int:
        """Number of beams for which the next step needs candidates; 1 before the first step."""
        return len(self._running)

    def step(self, candidates: Sequence[Sequence[tuple[float, int]]]) -> list[tuple[int, int]]:
        """Extend the beams. Return the continuing beams, best first, each as (index of its parent, token).

        Arguments:
            candidates: for each running beam, in the order in which the last step returned them, its
                `num_candidates` most likely tokens as (log-probability, token).
        """
        assert not self.is_done, "the search is done"
        assert len(candidates) == len(self._running), (
            f"candidates of {len(candidates)} beams, but {len(self._running)} run"
        )
        best = self._continuations(candidates)
        self._finished += [beam for beam in best[: self.width] if beam.finish_reason is not None]
        self._finished.sort(key=lambda beam: -beam.score)
        del self._finished[self.width :]
        self._running = [beam for beam in best if beam.finish_reason is None][: self.width]
        self.is_done = not self._can_improve()
        return [] if self.is_done else [(beam.parent, beam.tokens[-1]) for beam in self._running]

    def results(self) -> list[Beam]:
        """Return the finished beams, best first; fewer than `n` if not enough beams could finish."""
        return self._finished[: self._params.n]

    def _continuations(self, candidates: Sequence[Sequence[tuple[float, int]]]) -> list[Beam]:
        """Return the most likely continuations of all beams, best first."""
        length = len(self._running[0].tokens) + 1
        barred = self._end_ids if length <= self._params.min_tokens else frozenset[int]()
        scored = [
            (self._running[parent].logprob + logprob, parent, token)
            for parent, tokens in enumerate(candidates)
            for logprob, token in tokens
            if logprob > -math.inf and token not in barred
        ]
        scored.sort(key=lambda entry: -entry[0])  # stable: on ties, the earlier beam comes first
        best = []
        for logprob, parent, token in scored[: self.num_candidates]:
            ends = token in self._end_ids
            reason: FinishReason | None = "stop" if ends else "length" if length >= self._max_tokens else None
            score = 0.0 if reason is None else self._score(logprob, length)
            best.append(Beam(parent, (*self._running[parent].tokens, token), logprob, reason, score))
        return best

    def _can_improve(self) -> bool:
        if not self._running:
            return False
        if len(self._finished) < self.width:
            return True
        if self._params.early_stopping:
            return False
        best = self._running[0]
        return self._score(best.logprob, len(best.tokens)) > self._finished[-1].score

    def _score(self, logprob: float, length: int) -> float:
        power = self._params.length_penalty * math.log(length)
        return logprob / math.exp(max(-700.0, min(700.0, power)))  # within the range of a float
