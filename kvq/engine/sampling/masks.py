"""Bitmasks of the tokens that a grammar allows."""

import torch
from torch import Tensor


def apply_masks(logits: Tensor, masks: dict[int, Tensor]) -> None:
    """Set the logits of tokens that a row's mask forbids to -inf, in place.

    `logits`: fp32, [rows, vocab]; `masks`: row -> int32, [ceil(vocab / 32)], on any device. Bit j of
    word w allows token 32 * w + j.
    """
    vocab_size = logits.shape[-1]
    words = torch.stack(list(masks.values())).to(logits.device)  # [masks, words]
    assert words.shape[-1] == -(-vocab_size // 32), (
        f"a mask of {vocab_size} tokens has {-(-vocab_size // 32)} words, got {words.shape[-1]}"
    )
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    forbidden = (words[:, :, None] >> shifts & 1) == 0  # [masks, words, 32]
    forbidden = forbidden.flatten(1)[:, :vocab_size]
    rows = torch.tensor(list(masks), device=logits.device)
    logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)
