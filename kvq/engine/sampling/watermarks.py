"""Watermarks: change a step's scores to favor green tokens, or to apply a tournament.

The random words are those of `kvq/watermark/key.py`, computed in torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvq.engine.device.transfers import upload
from kvq.engine.params import SamplingParams
from kvq.engine.sampling.logprobs import chunks
from kvq.engine.sampling.rows import RowTable
from kvq.kernels.draw.reference import kept_masses, likeliest
from kvq.watermark.key import FIRST, GOLDEN, GREEN_BITS, SECOND, Key, green_bar
from kvq.watermark.schemes import Green, Scheme, Tournament

_ARRAYS = 4  # arrays over the vocabulary per row at once, 8 bytes per token
_TOTAL = 2.0**52  # of a row's masses in a tournament: fp64 adds them exactly, with room for rounding


class Watermarks:
    """Watermarks of a sampler's rows. They store no tokens: a mark depends only on the preceding tokens."""

    def __init__(
        self, scheme: Scheme, key: Key, *, max_rows: int, vocab_size: int, device: torch.device
    ) -> None:
        self._scheme = scheme
        self._key = key
        self._vocab_size = vocab_size
        self._device = device
        self._starts: dict[int, int] = {}  # row -> tokens of its prompt
        self._filters = RowTable(max_rows=max_rows, vocab_size=vocab_size, device=device)

    def __contains__(self, row: int) -> bool:
        return row in self._starts

    def add(self, row: int, params: SamplingParams, *, prompt_length: int) -> SamplingParams:
        """Start marking a row, and return the parameters that the sampler should still apply.

        With a tournament, only sampling remains, since temperature and filters are applied before the
        tournament. A greedy row has no tournament.
        """
        if isinstance(self._scheme, Tournament) and params.is_greedy:
            return params
        self._starts[row] = prompt_length
        if isinstance(self._scheme, Green):
            return params
        self._filters.add(row, params, seed=0, stop_ids=())
        return replace(params, temperature=1.0, top_k=None, top_p=1.0, min_p=0.0)

    def remove(self, row: int) -> None:
        """Remove a row, whether or not it is marked."""
        if self._starts.pop(row, None) is not None and row in self._filters:
            self._filters.remove(row)

    def apply(self, scores: Tensor, rows: Sequence[int], contexts: Mapping[int, Sequence[int]]) -> Tensor:
        """Return the scores with the mark, fp32, [batch, vocab]; the argument is unchanged.

        `rows`: the row of each batch index; `contexts`: for every marked row, keyed by batch index, all
        earlier tokens, including the prompt's. Other rows are returned unmarked.
        """
        marked = scores.to(torch.float32, copy=True)
        places = [place for place in contexts if rows[place] in self._starts]
        for part in chunks(len(places), _ARRAYS * self._vocab_size, self._device):
            mine = places[part]
            words = [self._word(contexts[place], self._starts[rows[place]]) for place in mine]
            index = upload(mine, self._device)
            some = marked[index]
            if isinstance(self._scheme, Green):
                every = torch.arange(self._vocab_size, device=self._device)[None]
                marked[index] = add_delta(some, self._words(words, every), self._scheme)
            else:
                marked[index] = self._drawn(some, [rows[place] for place in mine], words, self._scheme)
        return marked

    def _word(self, tokens: Sequence[int], start: int) -> int | None:
        """Return a context's random word, or None if the context is too short or was already used."""
        size = self._scheme.context
        if len(tokens) < size:
            return None
        if isinstance(self._scheme, Tournament) and _is_repeated(tokens, size, start):
            return None
        return self._key.word(self._scheme.tag, tokens[len(tokens) - size :])

    def _words(self, words: Sequence[int | None], tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens' random words, [rows, width], and whether each row has any, [rows]."""
        known = np.array([word is not None for word in words])
        seeds = np.array([word or 0 for word in words], dtype=np.uint64).view(np.int64)
        return (token_words(upload(seeds, self._device), tokens), upload(known, self._device, torch.bool))

    def _drawn(
        self, scores: Tensor, rows: Sequence[int], words: Sequence[int | None], scheme: Tournament
    ) -> Tensor:
        """Return logits at temperature 1 for the distribution after temperature, filters and tournament."""
        peaks, _ = likeliest(scores)
        settings = self._filters.settings(rows, [0] * len(rows))
        tokens, masses = kept_masses(scores, peaks, settings, self._filters.width(rows))
        bits, known = self._words(words, tokens)
        won = play(masses, bits, scheme.layers)
        logits = torch.where(known[:, None], won, masses.double()).log_().float()
        logits = torch.full_like(scores, -torch.inf).scatter_(1, tokens.expand_as(logits), logits)
        return torch.where(peaks.isfinite()[:, None], logits, scores)  # such masses are meaningless


def token_words(seeds: Tensor, tokens: Tensor) -> Tensor:
    """Return tokens' random words in their contexts: int64 [rows, width], bit-identical to `key.token_words`.

    `seeds`: int64 [rows], the bits of the contexts' words; `tokens`: int64 [rows or 1, width].
    """
    words = seeds[:, None] + (tokens + 1) * _signed(GOLDEN)  # wraps, as intended
    words = (words ^ _shifted(words, 30)) * _signed(FIRST)
    words = (words ^ _shifted(words, 27)) * _signed(SECOND)
    return words ^ _shifted(words, 31)


def add_delta(scores: Tensor, words: tuple[Tensor, Tensor], scheme: Green) -> Tensor:
    """Return scores, fp32 [rows, vocab], with delta added to every green token in rows that have words."""
    bits, known = words
    green = (_shifted(bits, 64 - GREEN_BITS) < green_bar(scheme)) & known[:, None]
    return torch.where(green, scores + scheme.delta, scores)


def play(masses: Tensor, words: Tensor, layers: int) -> Tensor:  # D266
    """Return the masses after a tournament of two candidates in `layers` rounds: fp64 [rows, width].

        p = p * (1 + g - sum(p * g))    g: a token's bit in the layer

    is the distribution of the better of two draws from p, or of either draw if their bits are equal.
    `masses`: int64 [rows, width], not all 0 in any row; `words`: int64 [rows, width]. Masses stay whole
    numbers whose sum is exact in fp64, so a sum doesn't depend on the order of its terms, nor a row on its
    batch. Each layer rounds down by at most 2**-52 of a row's total.

    Source: Dathathri et al. 2024, supplementary B, the vectorized form of two-candidate tournaments.
    """
    shares = masses.double() / masses.sum(dim=-1, keepdim=True)
    p = shares.mul_(_TOTAL).floor_()
    for layer in range(layers):
        won = p * (words >> layer & 1)
        p.mul_(1 - won.sum(dim=-1, keepdim=True) / _TOTAL).add_(won).floor_()
    return p


def _is_repeated(tokens: Sequence[int], size: int, start: int) -> bool:  # D268
    """Return True if the last `size` tokens are also the context of an earlier token at or after `start`."""
    window = np.asarray(tokens)[max(0, start - size) :]
    earlier = len(window) - size
    same = np.ones(earlier, dtype=bool)  # [earlier contexts]
    for i in range(size):
        same &= window[i : i + earlier] == window[earlier + i]
    return bool(same.any())


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Return 64-bit words, logically shifted to the right."""
    return words >> bits & (1 << 64 - bits) - 1 if bits else words


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
