"""Proposers whose guesses are right as often as a test wants."""

import random
from collections.abc import Mapping
from typing import Any

from kvq.engine import LLM
from kvq.engine.requests.request_state import Job
from kvq.engine.sampling.sampler import Drafted
from kvq.engine.speculation.drafter import Proposer
from kvq.scheduler import Branch, StepPlan
from tests.engine.kit import engine
from tests.helpers_models import VOCAB


class Oracle(Proposer):
    """Knows what each prompt's results are, and guesses wrong now and then."""

    takes_passes = False

    def __init__(
        self, answers: Mapping[tuple[int, ...], list[int]], *, right: float, seed: int = 0, vocab: int = VOCAB
    ) -> None:
        self._answers = answers
        self._right = right
        self._vocab = vocab
        self._rng = random.Random(seed)

    def most(self, branch: Branch, job: Job, limit: int) -> int:
        """Any number."""
        return self._rng.randint(0, limit)

    def propose(self, plan: StepPlan) -> dict[int, list[Drafted]]:
        """The answer's next tokens, or others."""
        found: dict[int, list[Drafted]] = {}
        for i, (branch, count) in enumerate(zip(plan.branches, plan.drafts, strict=True)):
            if count:
                answer = self._answers[tuple(branch.request.tokens)]
                coming = [*answer[branch.num_generated :], *[3] * count][:count]
                found[i] = [Drafted(self._guess(token)) for token in coming]
        return found

    def _guess(self, token: int) -> int:
        return token if self._rng.random() < self._right else self._rng.randrange(3, self._vocab)


def with_oracle(
    llm: LLM, prompts: list[list[int]], answers: list[list[int]], *, right: float = 0.8, vocab: int = VOCAB
) -> LLM:
    """The engine, which speculates, with an oracle in place of its proposer."""
    known = {tuple(prompt): answer for prompt, answer in zip(prompts, answers, strict=True)}
    speculator = llm.core.speculator
    assert speculator is not None
    speculator.proposer = Oracle(known, right=right, vocab=vocab)
    return llm


def speculating(model: Any, kv: str = "auto", *, k: int = 4, method: str = "ngram", **options: Any) -> LLM:
    """An engine that drafts whatever it costs."""
    values = {"method": method, "k": k, "adapts": False} | options.pop("speculation", {})
    return engine(model, kv, speculation=values, **options)


def counts(llm: LLM) -> tuple[int, int]:
    """Drafted and accepted tokens so far."""
    found = llm.core.scheduler.counters
    return found.drafted_tokens, found.accepted_tokens
