"""Rows that draw, as the Triton kernels and the reference take them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from kvq.kernels.draw import reference, triton
from kvq.kernels.draw.parameters import UNIFORM, Kind, packed
from kvq.kernels.draw.reference import likeliest

LAST = 1 - 2.0**-53  # the highest number a row can get


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What a row draws with."""

    temperature: float = 1.0  # 0: greedy
    min_p: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    uniform: float = 0.5

    def kind(self, vocab: int) -> Kind:
        if self.temperature == 0:
            return Kind.GREEDY
        return Kind.WHOLE if self._kept(vocab) == vocab and self.top_p == 1 else Kind.RANKED

    def line(self, vocab: int) -> np.ndarray:
        """Its parameters, packed."""
        line = packed(
            self.kind(vocab),
            temperature=self.temperature or 1.0,
            min_p=self.min_p,
            top_k=self._kept(vocab),
            top_p=self.top_p,
        )
        line[UNIFORM] = np.float64(self.uniform).view(np.int64)
        return line

    def token(self, logits: Tensor) -> int:
        """What the reference draws, from fp32 [vocab]."""
        rows, vocab = logits[None], len(logits)
        peaks, tokens = likeliest(rows)
        settings = reference.Settings(
            uniform=torch.tensor([self.uniform]).double(),
            temperature=torch.tensor([self.temperature]).double().float(),
            min_p=torch.tensor([self.min_p], dtype=torch.float64),
            top_k=torch.tensor([self._kept(vocab)], dtype=torch.float64),
            top_p=torch.tensor([self.top_p], dtype=torch.float64),
        )
        kind = self.kind(vocab)
        if kind is Kind.WHOLE:
            tokens = reference.draw_whole(rows, peaks, settings)
        elif kind is Kind.RANKED:
            tokens = reference.draw_ranked(rows, peaks, settings, vocab)
        return int(tokens)

    def _kept(self, vocab: int) -> int:
        return min(self.top_k or vocab, vocab)


def interpreted_masses(logits: Tensor, peaks: Tensor, temperature: Tensor | None = None) -> Tensor:
    """`masses` of the reference by NumPy's exponential, which is the interpreter's."""
    scores = (logits - peaks[:, None]).numpy()
    if temperature is not None:
        scores = scores / temperature[:, None].numpy()
    return torch.from_numpy((np.exp(scores) * np.float32(reference.MASS_OF_LIKELIEST)).astype(np.int64))


def drawn(logits: Tensor, rows: Sequence[Row], raw: Tensor | None = None) -> tuple[list[int], list[bool]]:
    """What the kernels draw, and whether the rows were finite."""
    vocab = logits.shape[-1]
    most = max(row.kind(vocab) for row in rows)
    lines = torch.from_numpy(np.stack([row.line(vocab) for row in rows])).to(logits.device)
    tokens, numbers = triton.draw(logits, None if most is Kind.GREEDY else lines, most, raw)
    told = numbers.view(3, len(rows))
    assert told[0].tolist() == tokens.tolist()
    finite = [math.isfinite(a) and math.isfinite(b) for a, b in told[1:].T.tolist()]
    return tokens.tolist(), finite


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that the kernels' host code takes holds nonsense."""
    empty = torch.empty

    def filled(*shape: int, **options: object) -> Tensor:
        return empty(*shape, **options).fill_(-7777)

    monkeypatch.setattr(triton.torch, "empty", filled)
