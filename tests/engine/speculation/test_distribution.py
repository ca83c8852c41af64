"""What comes of drafts is distributed as the target says, exactly, whatever the draft says.

A random target and a random draft over 50 tokens, each a table from the last two tokens to logits. Sequences
of 3 tokens are sampled as the engine does: by `Drafter.propose`, one pass of the target and `Chooser`; and
counted against the probability that the target gives each of the 125,000.
"""

from array import array
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch.nn import functional

from kvq.engine.device.runner import StepOutput
from kvq.engine.params import SamplingParams
from kvq.engine.requests.outputs import Timing
from kvq.engine.requests.request_state import Job
from kvq.engine.sampling.choose import Chooser
from kvq.engine.sampling.sampler import Sampler
from kvq.engine.speculation.drafter import Drafter, Growing
from kvq.kernels.draw import reference
from kvq.scheduler import Branch, StepPlan
from tests.engine.sampling.reference import adjusted, distribution

VOCAB, LENGTH, PROMPT = 50, 3, 7  # the prompt is one token
BATCH = 2000
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "filters": {"temperature": 0.8, "top_p": 0.9},
    "few": {"temperature": 1.2, "top_k": 12, "min_p": 0.02},
    "penalties": {
        "temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.4, "presence_penalty": 0.5,
        "frequency_penalty": 0.6, "logit_bias": {3: 1.0},
    },
}  # fmt: skip


@cache
def tables(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the target and of the draft: fp32 [VOCAB] * 3, by the token before the last, and the last."""
    generator = torch.Generator().manual_seed(seed)
    target = 1.4 * torch.randn(VOCAB, VOCAB, VOCAB, generator=generator)
    return target, target + 1.2 * torch.randn(VOCAB, VOCAB, VOCAB, generator=generator)


def logits_of(table: torch.Tensor, contexts: list[list[int]]) -> torch.Tensor:
    """[contexts, VOCAB], by their last two tokens."""
    before, last = torch.tensor([context[-2:] for context in contexts]).T
    return table[before, last]


class TableDraft(Drafter):
    """Reads the draft's table."""

    def __init__(self, chooser: Chooser, table: torch.Tensor, padding: int = 0) -> None:
        super().__init__(chooser)
        self._table = table
        self._padding = padding

    def logits(self, plan: StepPlan, growing: list[Growing]) -> torch.Tensor:
        logits = logits_of(self._table, [[*one.branch.tokens, *one.tokens] for one in growing])
        return functional.pad(logits, (0, self._padding), value=9.0)


def sample(count: int, k: int, options: dict[str, Any], seed: int, *, padding: int = 0) -> np.ndarray:
    """int64 [count, LENGTH]: sequences of the first tokens that come, with k drafts a step."""
    target, draft = tables(seed)
    found = []
    for first in range(0, count, BATCH):
        size, own = min(BATCH, count - first), 1_000_003 * seed + first
        found += _batch(size, k, options, own, target, draft, padding)
    return np.array(found)


def _batch(
    count: int,
    k: int,
    options: dict[str, Any],
    seed: int,
    target: torch.Tensor,
    draft: torch.Tensor,
    padding: int,
) -> list[list[int]]:
    sampler = Sampler(max_rows=count, vocab_size=VOCAB, device=torch.device("cpu"))
    chooser, jobs = Chooser(sampler, count), []
    params = SamplingParams(max_tokens=16, **options)
    for row in range(count):
        job = Job(
            id=str(row),
            tokens=array("I", (PROMPT, PROMPT)),
            max_tokens=16,
            params=params,
            prompt=None,
            seed=seed + row,
            end_ids=(),
            timing=Timing(arrival_s=0.0),
        )
        job.make_branches(max_tokens=16, now=0.0)
        job.branches[0].row = row
        job.results = [SimpleNamespace(matcher=None)]  # type: ignore[list-item]
        jobs.append(job)
    proposer = TableDraft(chooser, draft, padding)
    running = [job.branches[0] for job in jobs]
    while running:
        plan = _plan(running, k)
        drafts = proposer.propose(plan)
        contexts = []
        for i, branch in enumerate(running):
            tokens = [one.token for one in drafts.get(i, ())]
            contexts += [[*branch.tokens, *tokens[:j]] for j in range(k + 1)]
        output = StepOutput(
            logits=logits_of(target, contexts), starts=[i * (k + 1) for i in range(len(running))],
            bad_tokens=torch.zeros(len(contexts), dtype=torch.bool), attention_s=0.0,
        )  # fmt: skip
        wanted = chooser.prepare(plan, output, {}, drafts)
        choices = chooser.choose(wanted, output).wait()
        assert not choices.errors
        for i, branch in enumerate(running):
            for token, _ in choices.tokens[i]:
                branch.tokens.append(token)
                chooser.record(branch, token)
        running = [branch for branch in running if branch.num_generated < LENGTH]
    return [job.branches[0].tokens[2 : 2 + LENGTH].tolist() for job in jobs]


def _plan(branches: list[Branch], k: int) -> StepPlan:
    count = len(branches)
    return StepPlan(
        number=0, branches=branches, num_decodes=count, counts=[1 + k] * count, drafts=[k] * count,
        ends=[len(branch.tokens) + k for branch in branches], samples=[True] * count,
        token_ids=[0] * (count * (1 + k)), moves=[None] * count, orders=[],
    )  # fmt: skip


@cache
def exact(seed: int, kind: str) -> np.ndarray:
    """fp64 [VOCAB] * LENGTH: the probability of every sequence, by the rules in plain Python."""
    params, target = SamplingParams(**KINDS[kind]), tables(seed)[0]
    found = np.zeros((VOCAB,) * LENGTH)

    def go_on(tokens: tuple[int, ...], probability: float) -> None:
        context = [PROMPT, PROMPT, *tokens]
        scores = adjusted(target[context[-2], context[-1]].tolist(), params, [PROMPT], list(tokens))
        for token, share in distribution(scores, params).items():
            if len(tokens) + 1 == LENGTH:
                found[(*tokens, token)] = probability * share
            else:
                go_on((*tokens, token), probability * share)

    go_on((), 1.0)
    return found


def p_value(sequences: np.ndarray, probabilities: np.ndarray) -> float:
    """Of a chi-square test; cells that hold less than 5 sequences on average are put together."""
    expected = probabilities.ravel() * len(sequences)
    cells = np.ravel_multi_index(tuple(sequences.T), probabilities.shape)
    observed = np.bincount(cells, minlength=len(expected))
    assert not observed[expected == 0].any(), "a sequence that can't come"
    small = expected < 5
    wanted, got = [*expected[~small], expected[small].sum()], [*observed[~small], observed[small].sum()]
    if wanted[-1] < 5:
        wanted[-2:], got[-2:] = [sum(wanted[-2:])], [sum(got[-2:])]
    statistic = sum((g - w) ** 2 / w for g, w in zip(got, wanted, strict=True))
    return float(chi2.sf(statistic, len(wanted) - 1))


every_case = pytest.mark.parametrize(
    ("k", "kind", "seed"), [(k, kind, seed) for k in range(1, 6) for kind in KINDS for seed in (1, 2, 3)]
)


@pytest.mark.daily(1)
@every_case
def test_sequences_are_distributed_as_the_target_says(k, kind, seed):
    assert p_value(sample(15_000, k, KINDS[kind], seed), exact(seed, kind)) > 0.001


@pytest.mark.long
@every_case
def test_200_000_sequences_are_distributed_as_the_target_says(k, kind, seed):
    assert p_value(sample(200_000, k, KINDS[kind], seed), exact(seed, kind)) > 0.001


@pytest.mark.parametrize("kind", ["plain", "penalties"])
def test_without_drafts_the_test_passes_too(kind):
    assert p_value(sample(10_000, 0, KINDS[kind], 1), exact(1, kind)) > 0.001


@pytest.mark.parametrize("padding", [5, -5])
def test_a_draft_of_a_wider_or_narrower_vocabulary_changes_nothing(padding):
    """A narrower one never proposes the last tokens; what a wider one says beyond them is left out."""
    assert p_value(sample(10_000, 2, KINDS["plain"], 1, padding=padding), exact(1, "plain")) > 0.001


def _keeps_all(target: Any, draft: Any, tokens: Any, keeping: Any, uniform: Any) -> Any:
    return tokens


def _replaces_from_target(target: Any, draft: Any, tokens: Any, keeping: Any, uniform: Any) -> Any:
    """What is not kept makes way for a token of the target's distribution, instead of the rest of it."""
    p, q = (x.double() / x.sum(dim=-1, keepdim=True) for x in (target, draft))
    kept = keeping * q.gather(1, tokens[:, None])[:, 0] < p.gather(1, tokens[:, None])[:, 0]
    other = (p.cumsum(dim=-1) <= uniform[:, None]).sum(dim=-1).clamp(max=VOCAB - 1)
    return torch.where(kept, tokens, other)


def _keeps_by_the_target_alone(target: Any, draft: Any, tokens: Any, keeping: Any, uniform: Any) -> Any:
    """A draft is kept with p(x), as one without a distribution is."""
    p = target.double() / target.sum(dim=-1, keepdim=True)
    kept = keeping < p.gather(1, tokens[:, None])[:, 0]
    right = reference.keep_or_replace(target, draft, tokens, torch.ones_like(keeping), uniform)
    return torch.where(kept, tokens, right)


@pytest.mark.parametrize("wrong", [_keeps_all, _replaces_from_target, _keeps_by_the_target_alone])
def test_a_wrong_rule_fails_the_same_test(wrong, monkeypatch):
    if wrong is _keeps_by_the_target_alone:
        real = reference.keep_or_replace
        monkeypatch.setitem(wrong.__globals__, "reference", SimpleNamespace(keep_or_replace=real))
    monkeypatch.setattr("kvq.kernels.draw.reference.keep_or_replace", wrong)
    assert p_value(sample(8_000, 2, KINDS["plain"], 1), exact(1, "plain")) < 1e-6
