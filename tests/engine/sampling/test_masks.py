"""Promises: a mask allows exactly its tokens, on its own row, in odd vocabularies."""

import pytest
import torch

from kvq.engine.params import SamplingParams
from kvq.engine.sampling.penalties import apply_masks
from tests.engine.sampling.reference import add, bitmask, sampler


@pytest.mark.parametrize("vocab_size", [31, 32, 33, 4097])
def test_allowed_tokens_keep_their_logits(vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(4, vocab_size, generator=generator)
    allowed = {0: {0, 31 % vocab_size, vocab_size - 1}, 2: set(range(0, vocab_size, 3))}
    got = logits.clone()
    apply_masks(got, {place: bitmask(tokens, vocab_size) for place, tokens in allowed.items()})
    for place in range(4):
        kept = allowed.get(place, set(range(vocab_size)))
        assert set(got[place].isfinite().nonzero()[:, 0].tolist()) == kept
        assert torch.equal(got[place, sorted(kept)], logits[place, sorted(kept)])


@pytest.mark.parametrize("vocab_size", [33, 4097])
def test_masks_mean_what_llguidance_means(vocab_size):
    llguidance = pytest.importorskip("llguidance.numpy")
    words = torch.randint(-(1 << 31), 1 << 31, (3, -(-vocab_size // 32))).to(torch.int32)
    got = torch.randn(3, vocab_size)
    wanted = got.clone()
    llguidance.apply_token_bitmask_inplace(wanted.numpy(), words.numpy())
    apply_masks(got, dict(enumerate(words)))
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}], ids=str)
def test_only_allowed_tokens_are_chosen(options):
    target, logits = sampler(33, 50), torch.zeros(50, 33)
    for row in range(50):
        add(target, row, SamplingParams(**options), seed=row)
    samples = target.sample(
        logits, list(range(50)), [0] * 50, masks=dict.fromkeys(range(0, 50, 2), bitmask({7, 32}, 33))
    ).wait()
    assert set(samples.tokens[::2]) <= {7, 32}
    assert all(samples.finite)


def test_a_mask_that_leaves_nothing_is_reported():
    target, logits = sampler(33, 2), torch.zeros(2, 33)
    add(target, 0, SamplingParams())
    add(target, 1, SamplingParams())
    samples = target.sample(logits, [0, 1], [0, 0], masks={1: bitmask((), 33)}).wait()
    assert samples.finite == [True, False]
