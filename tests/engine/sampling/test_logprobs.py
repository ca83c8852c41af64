"""Promises: log-probabilities are the model's own, ranks and tops agree, beams see them too."""

import math

import pytest
import torch

from kvq.engine.params import SamplingParams
from kvq.engine.sampling.logprobs import beam_candidates, prompt_logprobs
from tests.engine.sampling.reference import add, sampler


def _logits(rows: int, vocab_size: int) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(rows)) * 4


@pytest.mark.parametrize("vocab_size", [3, 33, 4097])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_prompt_logprobs_are_log_softmax(vocab_size, dtype):
    logits = _logits(70, vocab_size).to(dtype)
    targets = [row % vocab_size for row in range(70)]
    exact = torch.log_softmax(logits.float().double(), dim=-1)
    order = exact.sort(dim=-1, descending=True, stable=True).indices
    for row, found in enumerate(prompt_logprobs(logits, targets, 5)):
        assert found.token == targets[row]
        assert found.logprob == pytest.approx(exact[row, targets[row]].item(), abs=1e-6, rel=1e-6)
        assert order[row, found.rank - 1] == targets[row]
        assert [token for token, _ in found.top] == order[row, :5].tolist()
        assert [value for _, value in found.top] == pytest.approx(
            [exact[row, token].item() for token, _ in found.top], abs=1e-6, rel=1e-6
        )


def test_equally_likely_tokens_rank_by_id_and_impossible_ones_are_minus_infinity():
    logits = torch.tensor([[1.0, 2, 2, -torch.inf, 2]] * 2)
    middle, impossible = prompt_logprobs(logits, [2, 3], 2)
    assert middle.rank == 2
    assert [token for token, _ in middle.top] == [1, 2]
    assert (impossible.logprob, impossible.rank) == (-math.inf, 5)


def test_logits_that_are_not_finite_give_nan():
    logits = torch.tensor([[1.0, torch.nan, 2], [1, torch.inf, 2], [-torch.inf] * 3])
    assert all(math.isnan(found.logprob) for found in prompt_logprobs(logits, [0, 0, 0], 1))


def test_the_sampler_reports_the_model_before_any_change():
    """Only rows that ask are measured; best_of asks for the chosen token's alone."""
    logits, target = _logits(4, 33), sampler(33, 4)
    exact = torch.log_softmax(logits.double(), dim=-1)
    bias = {"temperature": 0.5, "logit_bias": {4: 100.0}, "top_p": 0.5}
    add(target, 0, SamplingParams(logprobs=3, **bias))
    add(target, 1, SamplingParams(best_of=2, **bias))
    add(target, 2, SamplingParams(**bias))
    add(target, 3, SamplingParams(logprobs=60, **bias))
    samples = target.sample(logits, [0, 1, 2, 3], [0] * 4).wait()
    assert samples.tokens == [4] * 4
    assert [found and len(found.top) for found in samples.logprobs] == [3, 0, None, 33]
    for row in (0, 1, 3):
        found = samples.logprobs[row]
        assert found.logprob == pytest.approx(exact[row, 4].item(), abs=1e-6)
        assert found.rank == 1 + (exact[row] > exact[row, 4]).sum()
    assert samples.logprobs[0].top == prompt_logprobs(logits, [4] * 4, 3)[0].top


@pytest.mark.parametrize("vocab_size", [33, 4097])
def test_beam_candidates_are_the_likeliest(vocab_size):
    logits = _logits(80, vocab_size)
    values, tokens = beam_candidates(logits, 8)
    wanted = torch.log_softmax(logits.double(), dim=-1).sort(dim=-1, descending=True, stable=True)
    assert tokens == wanted.indices[:, :8].tolist()
    torch.testing.assert_close(torch.tensor(values).double(), wanted.values[:, :8], rtol=1e-6, atol=1e-6)
    assert len(beam_candidates(logits[:, :3], 8)[0][0]) == 3
