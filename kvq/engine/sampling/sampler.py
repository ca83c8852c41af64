"""The sampler: one step's logits in, one token a row out."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvq.engine.params import SamplingParams, check_params
from kvq.engine.sampling.filters import MAX_VOCAB, draw_ranked, draw_whole
from kvq.engine.sampling.logprobs import TokenLogprobs, chunks, measure, read_logprobs
from kvq.engine.sampling.penalties import apply_biases, apply_masks, apply_penalties
from kvq.engine.sampling.ranking import likeliest
from kvq.engine.sampling.rows import Draw, RowTable
from kvq.engine.sampling.token_counts import TokenCounts
from kvq.engine.transfers import Readback


@dataclass(frozen=True, slots=True)
class Samples:
    """What one step chose, one entry a row of its logits.

    `finite`: False where the row's logits hold NaN or +inf, or where nothing finite is left to choose
    from; its token means nothing then, and its log-probabilities are None. `logprobs`: for rows whose
    parameters ask for `logprobs` or have a `best_of`, which compares its samples by them.
    """

    tokens: list[int]
    finite: list[bool]
    logprobs: list[TokenLogprobs | None]


@dataclass(frozen=True, slots=True)
class PendingSamples:
    """What a step chose, on its way to the host."""

    tokens: Tensor  # int64 [batch], on the device
    _numbers: Readback
    _unpack: Callable[[list[float]], Samples]

    def wait(self) -> Samples:
        """The samples, once they are there."""
        return self._unpack(self._numbers.wait())


class Sampler:
    """Chooses tokens for many rows at once, each as if it were alone.

    A row's token depends, bit for bit, on its own logits, parameters, seed and count, and on the tokens
    recorded where it has penalties; never on its neighbours, its place or its row number.
    """

    def __init__(self, *, max_rows: int, vocab_size: int, device: torch.device) -> None:
        assert vocab_size <= MAX_VOCAB, f"masses of {vocab_size} tokens may overflow; {MAX_VOCAB} at most"
        self._vocab_size = vocab_size
        self._device = device
        self._table = RowTable(max_rows=max_rows, vocab_size=vocab_size, device=device)
        self._counts = TokenCounts(device)
        self._demanding: set[int] = set()  # rows that need more than their likeliest token

    def add(
        self,
        row: int,
        params: SamplingParams,
        *,
        prompt: Sequence[int],
        generated: Sequence[int],
        seed: int,
        stop_ids: Sequence[int],
    ) -> None:
        """Begin to use a row.

        `prompt`, `generated`: the tokens so far, all within the vocabulary. `seed`: of this branch alone,
        see `mix_seed`. `stop_ids`: what must not come before `params.min_tokens` tokens.

        Raises:
            RequestError: the parameters name a token beyond the vocabulary. Nothing was begun.
        """
        check_params(params, self._vocab_size)
        held = self._table.add(row, params, seed=seed, stop_ids=stop_ids)
        if params.has_penalties:
            self._counts.add(row, prompt if params.repetition_penalty != 1 else (), generated)
        if not held.is_plain:
            self._demanding.add(row)

    def remove(self, row: int) -> None:
        """Forget a row in use; the next `add` finds nothing of it."""
        self._table.remove(row)
        self._demanding.discard(row)
        if row in self._counts:
            self._counts.remove(row)

    def record(self, row: int, token: int) -> None:
        """Tell that the row's branch goes on with `token`; penalties count it from now on."""
        if row in self._counts:
            self._counts.record(row, token)

    @torch.no_grad()
    def sample(
        self,
        logits: Tensor,
        rows: list[int],
        counts: list[int],
        *,
        masks: dict[int, Tensor] | None = None,
    ) -> PendingSamples:
        """Choose a token for each row of logits; one transfer to the host. The logits aren't changed.

        `logits`: any float type, [batch, vocab], -inf where a token is impossible; `rows`: which row each
        belongs to, none twice; `counts`: tokens generated so far, [batch]; `masks`: place in the batch ->
        bitmask of the tokens allowed, int32, [ceil(vocab / 32)], bit j of word w for token 32 * w + j.
        A mask that allows only stops before min_tokens leaves nothing, and the row isn't finite.
        """
        logits = logits.float()
        if not masks and self._demanding.isdisjoint(rows):
            return _greedy(logits)
        scores = self._scores(logits, rows, counts, masks or {})
        peaks, tokens = likeliest(scores)
        raw_peaks = peaks if scores is logits else logits.amax(dim=-1)  # a mask may hide what isn't finite
        self._draw(scores, peaks, rows, counts, tokens)
        return self._packed(logits, rows, tokens, torch.stack((raw_peaks, peaks)))

    def _scores(self, logits: Tensor, rows: list[int], counts: list[int], masks: dict[int, Tensor]) -> Tensor:
        """The logits after penalties, biases, forbidden stops and masks; a copy if anything changes."""
        penalized = [place for place, row in enumerate(rows) if row in self._counts]
        biased, biases = self._table.biases(rows, counts)
        if not (penalized or biases or masks):
            return logits
        scores = logits.clone()
        if penalized:
            mine = [rows[place] for place in penalized]
            owners, tokens, seen = self._counts.read(mine)
            strengths = self._table.penalties(mine)[:, owners]
            places = torch.tensor(penalized, device=self._device)[owners]
            apply_penalties(scores, places, tokens, seen, strengths)
        if biases:
            apply_biases(scores, biased, biases)
        if masks:
            apply_masks(scores, masks)
        return scores

    def _draw(
        self, scores: Tensor, peaks: Tensor, rows: list[int], counts: list[int], tokens: Tensor
    ) -> None:
        """Put what is drawn into `tokens`, in place; those of greedy rows stay."""
        groups: dict[Draw, list[int]] = {}
        for place, row in enumerate(rows):
            groups.setdefault(self._table[row].draw, []).append(place)
        groups.pop(Draw.GREEDY, None)
        for kind, places in groups.items():
            mine = [rows[place] for place in places]
            settings = self._table.settings(mine, [counts[place] for place in places])
            width = self._table.width(mine)
            index = torch.tensor(places, device=self._device)
            for part in chunks(len(places), self._vocab_size, self._device):
                chosen = index[part]
                whole = len(chosen) == len(rows)  # then a selection would be a copy of everything
                some, tops = (scores, peaks) if whole else (scores[chosen], peaks[chosen])
                tokens[chosen] = (
                    draw_whole(some, tops, settings[part])
                    if kind is Draw.WHOLE
                    else draw_ranked(some, tops, settings[part], width)
                )

    def _packed(self, logits: Tensor, rows: list[int], tokens: Tensor, peaks: Tensor) -> PendingSamples:
        """Bring everything to the host in one transfer. `peaks`: before and after changes, [2, batch]."""
        wanted = [place for place, row in enumerate(rows) if self._table[row].wants_logprobs]
        tops = [min(self._table[rows[place]].params.logprobs or 0, self._vocab_size) for place in wanted]
        pieces = [tokens.double(), peaks.double().flatten()]
        if wanted:
            index = torch.tensor(wanted, device=self._device)
            for part in chunks(len(wanted), self._vocab_size, self._device):
                chosen = index[part]
                pieces.append(measure(logits[chosen], tokens[chosen], max(tops)).flatten())
        unpack = partial(_unpack, batch=len(rows), wanted=wanted, tops=tops)
        return PendingSamples(tokens, Readback(torch.cat(pieces)), unpack)


def _unpack(numbers: list[float], *, batch: int, wanted: list[int], tops: list[int]) -> Samples:
    """Read tokens, peaks before and after changes, and log-probabilities of the places that want some."""
    tokens = [int(token) for token in numbers[:batch]]
    before, after = numbers[batch : 2 * batch], numbers[2 * batch : 3 * batch]
    finite = [math.isfinite(a) and math.isfinite(b) for a, b in zip(before, after, strict=True)]
    logprobs: list[TokenLogprobs | None] = [None] * batch
    stride = 4 + 2 * max(tops, default=0)
    for start, place, top in zip(range(3 * batch, len(numbers), stride), wanted, tops, strict=True):
        if finite[place]:
            logprobs[place] = read_logprobs(tokens[place], numbers[start : start + stride], top)
    return Samples(tokens, finite, logprobs)


def _greedy(logits: Tensor) -> PendingSamples:
    """The likeliest tokens of rows that ask for nothing else."""
    peaks, tokens = likeliest(logits)
    return PendingSamples(tokens, Readback(torch.cat((tokens.double(), peaks.double()))), _unpack_greedy)


def _unpack_greedy(numbers: list[float]) -> Samples:
    batch = len(numbers) // 2
    return Samples(
        tokens=[int(token) for token in numbers[:batch]],
        finite=[math.isfinite(peak) for peak in numbers[batch:]],
        logprobs=[None] * batch,
    )
