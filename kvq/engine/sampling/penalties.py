"""Logit changes: penalties, biases, forbidden tokens and grammar masks."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvq.engine.device.transfers import upload

Bias = tuple[Tensor, Tensor]  # tokens of a row, int64, and what is added to their logits, fp32; -inf forbids


def apply_penalties(
    logits: Tensor, places: Tensor, tokens: Tensor, counts: Tensor, strengths: Tensor
) -> None:
    """Lower the logits of tokens that were there before, in place.

        logit = logit / r if logit > 0 else logit * r    tokens of the prompt and generated ones
        logit = logit - presence * (count > 0) - frequency * count

    `logits`: fp32, [rows, vocab]; `places`, `tokens`, `counts`: which logits, and how often each token
    was generated, [tokens]; `strengths`: r, presence and frequency of each of these, fp32, [3, tokens].
    Sources: Keskar et al. 2019 (CTRL), section 4.1; OpenAI's API reference.
    """
    repetition, presence, frequency = strengths
    old = logits[places, tokens]
    new = torch.where(old > 0, old / repetition, old * repetition)
    new = new - presence * (counts > 0) - frequency * counts
    logits[places, tokens] = new


def apply_biases(logits: Tensor, places: Sequence[int], biases: Sequence[Bias]) -> None:
    """Add `biases[i]` to row `places[i]` of the logits, in place; a row may come more than once."""
    rows = upload(np.repeat(places, [len(tokens) for tokens, _ in biases]), logits.device)
    tokens, amounts = map(torch.cat, zip(*biases, strict=True))
    logits.index_put_((rows, tokens), amounts, accumulate=True)


def apply_masks(logits: Tensor, masks: dict[int, Tensor]) -> None:
    """Set the logits of tokens that a row's mask forbids to -inf, in place.

    `logits`: fp32, [rows, vocab]; `masks`: row -> int32, [ceil(vocab / 32)], on the host. Bit j of
    word w allows token 32 * w + j.
    """
    vocab_size = logits.shape[-1]
    given = torch.stack(list(masks.values())).numpy()
    words = upload(given, logits.device, torch.int32)  # [masks, words]
    assert words.shape[-1] == -(-vocab_size // 32), (
        f"a mask of {vocab_size} tokens has {-(-vocab_size // 32)} words, got {words.shape[-1]}"
    )
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    forbidden = (words[:, :, None] >> shifts & 1) == 0  # [masks, words, 32]
    forbidden = forbidden.flatten(1)[:, :vocab_size]
    rows = upload(list(masks), logits.device)
    logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)
