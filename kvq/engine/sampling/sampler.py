"""Sampler: selects one token per row from the logits of a step."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import and_
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from kvq.engine.device.transfers import Readback, readbacks, upload
from kvq.engine.params import SamplingParams, check_params
from kvq.engine.requests.outputs import TokenLogprobs
from kvq.engine.sampling.logprobs import chunks, measure, read_logprobs
from kvq.engine.sampling.penalties import TokenCounts, apply_biases, apply_masks, apply_penalties
from kvq.engine.sampling.rows import RowTable
from kvq.engine.sampling.seeds import Purpose
from kvq.engine.sampling.watermarks import Watermarks
from kvq.kernels.draw import kernel_for, reference
from kvq.kernels.draw.parameters import Kind, packed
from kvq.watermark.key import Key
from kvq.watermark.schemes import Scheme

_NONE: Mapping[int, Sequence[int]] = MappingProxyType({})


@dataclass(slots=True)  # one per step: a frozen one would take four times as long to create
class _Samples:
    """Tokens of one step, with one entry per row of its logits.

    `finite`: False if the row's logits contain NaN or +inf, or no finite logit remains; the token is then
    meaningless, and its log-probabilities are None. `logprobs`: for rows whose parameters set `logprobs` or
    `best_of`, which ranks samples by log-probability.
    """

    tokens: list[int]
    finite: list[bool]
    logprobs: list[TokenLogprobs | None]


@dataclass(frozen=True, slots=True)
class Drafted:
    """Draft token with the distribution that it was sampled from.

    `masses`: int64 [vocab], proportional to the distribution; None if the draft is compared with the token
    that the row samples in any case (see `_Row.repeats`).
    """

    token: int
    masses: Tensor | None = None


# Drafts before a row's token, and the draft to keep or replace if it was drawn from a distribution
AfterDrafts = tuple[Sequence[int], Drafted | None]
_NO_DRAFTS: Mapping[int, AfterDrafts] = MappingProxyType({})


@dataclass(slots=True)  # one per step, as above
class PendingSamples:
    """Samples that are being transferred to the host."""

    tokens: Tensor  # int64 [batch], on the device
    _numbers: Readback
    _unpack: Callable[[list[float]], _Samples]

    def wait(self) -> _Samples:
        """Wait for the samples and return them."""
        return self._unpack(self._numbers.wait())


class Sampler:
    """Token sampler for many rows at once. Each row gets the same result as if it were sampled alone.

    A row's token depends, bit for bit, on the row's logits, parameters, seed and token count; with penalties,
    also on its recorded tokens, and with a watermark, also on the preceding tokens. It never depends on other
    rows, its index in the batch or its row number.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        watermark: tuple[Scheme, Key] | None = None,
    ) -> None:
        most = reference.MAX_VOCAB
        assert vocab_size <= most, f"masses of {vocab_size} tokens may overflow; {most} at most"
        self.vocab_size = vocab_size
        self.read_back = readbacks(device)
        self._device = device
        self._table = RowTable(max_rows=max_rows, vocab_size=vocab_size, device=device)
        self._counts = TokenCounts(device)
        self._watermarks = (
            None
            if watermark is None
            else Watermarks(*watermark, max_rows=max_rows, vocab_size=vocab_size, device=device)
        )
        self.has_watermarks = watermark is not None  # rows may be marked
        self._kernel = kernel_for(device)
        self._demanding: set[int] = set()  # rows that need more than the most likely token
        self._changing: set[int] = set()  # rows whose logits are changed
        self._measured: set[int] = set()  # rows that need log-probabilities

    def compile(self, dtype: torch.dtype) -> None:
        """Compile the GPU kernels for logits of this dtype. Takes several seconds."""
        if self._kernel is None:
            return
        logits = torch.zeros(1, self.vocab_size, dtype=dtype, device=self._device)
        line = packed(Kind.RANKED, temperature=1.0, min_p=0.0, top_k=1, top_p=1.0)
        drawing = upload(line[None], self._device)
        for scores, raw in ((logits, None), (logits.float(), logits)):
            self._kernel(scores, None, Kind.GREEDY, raw)
            self._kernel(scores, drawing, Kind.RANKED, raw)

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
        """Start using a row.

        `prompt`, `generated`: the tokens so far, all of them within the vocabulary. `seed`: specific to this
        branch, see `mix_seed`. `stop_ids`: tokens forbidden before `params.min_tokens` tokens. If
        `params.watermark` is True, the row is marked.

        Raises:
            RequestError: the parameters contain a token outside the vocabulary; the row then stays unused.
        """
        check_params(params, self.vocab_size)
        if params.watermark:
            assert self._watermarks is not None, "requests that ask for a mark without a key are refused"
            params = self._watermarks.add(row, params, prompt_length=len(prompt))
        held = self._table.add(row, params, seed=seed, stop_ids=stop_ids)
        if params.has_penalties:
            self._counts.add(row, prompt if params.repetition_penalty != 1 else (), generated)
        if not held.is_plain:
            self._demanding.add(row)
        if held.changes_logits:
            self._changing.add(row)
        if held.wants_logprobs:
            self._measured.add(row)

    def remove(self, row: int) -> None:
        """Stop using a row."""
        self._table.remove(row)
        if self._watermarks is not None:
            self._watermarks.remove(row)
        for rows in (self._demanding, self._changing, self._measured):
            rows.discard(row)
        if row in self._counts:
            self._counts.remove(row)

    def record(self, row: int, token: int) -> None:
        """Record `token` as the row's next token, which counts toward penalties from now on."""
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
        drafts: Mapping[int, AfterDrafts] = _NO_DRAFTS,
        contexts: Mapping[int, Sequence[int]] | None = None,
    ) -> PendingSamples:
        """Choose a token for each row of logits, with one transfer to the host. The logits are unchanged.

        `logits`: any float type, [batch, vocab], -inf for impossible tokens. `rows`, `counts`: [batch], the
        sampler row and token count of each batch index. All other arguments are keyed by batch index.
        `masks`: allowed tokens as a bitmask, int32 [ceil(vocab / 32)], bit j of word w for token 32 * w + j;
        before `min_tokens`, a mask must not allow only stop tokens. `contexts`: all earlier tokens of a
        marked row. `drafts`: for rows that occur several times, the drafts before the token, included in
        `counts`.
        """
        ahead = {place: tokens for place, (tokens, _) in drafts.items()} if drafts else _NONE
        scores = self._marked(self._scores(logits, rows, counts, masks or {}, ahead), rows, contexts)
        raw = None if scores is logits else logits  # a change may hide values that are not finite
        tokens, numbers = self._drawn(scores, rows, counts, raw)
        if kept := {place: one for place, (_, one) in drafts.items() if one is not None} if drafts else None:
            index, chosen = self._kept(scores, rows, counts, kept)
            tokens[index], numbers[index] = chosen, chosen.double()
        return self._pending(logits, rows, tokens, numbers)

    @torch.no_grad()
    def draft(
        self,
        logits: Tensor,
        rows: list[int],
        counts: list[int],
        *,
        masks: dict[int, Tensor] | None = None,
        ahead: Mapping[int, Sequence[int]] = _NONE,
        contexts: Mapping[int, Sequence[int]] | None = None,
    ) -> list[Drafted]:
        """Sample a draft token for each row from the drafting model's logits; see `sample`.

        `ahead`: the earlier drafts, keyed by batch index. A row whose tokens must not depend on drafts gets
        the token that it would sample from these logits; any other row gets an independent sample.
        """
        scores = self._marked(self._scores(logits, rows, counts, masks or {}, ahead), rows, contexts)
        tokens, _ = self._drawn(scores, rows, counts, None)
        free = [place for place, row in enumerate(rows) if not self._table[row].repeats]
        masses: dict[int, Tensor] = {}
        if free:
            index = upload(free, self._device)
            mine = scores[index].float()
            drawn_from, uniform = self._masses(
                mine, [rows[i] for i in free], [counts[i] for i in free], Purpose.DRAFT
            )
            sums = drawn_from.cumsum(dim=-1)
            tokens[index] = reference.draw(sums, sums[:, -1], uniform)
            finite = torch.isfinite(mine.amax(dim=-1)).tolist()
            masses = {place: row for place, row, good in zip(free, drawn_from, finite, strict=True) if good}
        return [Drafted(token, masses.get(place)) for place, token in enumerate(tokens.tolist())]

    def _marked(
        self, scores: Tensor, rows: list[int], contexts: Mapping[int, Sequence[int]] | None
    ) -> Tensor:
        """Return the scores with the watermarks of marked rows applied."""
        if not contexts:
            return scores
        assert self._watermarks is not None, "rows are marked only with a key"
        return self._watermarks.apply(scores, rows, contexts)

    def _drawn(
        self, scores: Tensor, rows: list[int], counts: list[int], raw: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens, and the numbers to copy to the host."""
        if self._kernel is None:
            return self._draw(scores.float(), rows, counts, raw)
        tokens, numbers = self._kernel(scores, *self._parameters(rows, counts), raw)
        return tokens, numbers

    def _kept(
        self, scores: Tensor, rows: list[int], counts: list[int], drafted: Mapping[int, Drafted]
    ) -> tuple[Tensor, Tensor]:
        """Return the indices of drafts with a distribution, and the token that keeps or replaces each."""
        places = list(drafted)
        index = upload(places, self._device)
        mine, behind = [rows[place] for place in places], [counts[place] for place in places]
        target, uniform = self._masses(scores[index].float(), mine, behind, Purpose.TOKEN)
        draft = torch.stack([one.masses for one in drafted.values() if one.masses is not None])
        tokens = upload([one.token for one in drafted.values()], self._device)
        keeping = self._table.keeping(mine, behind)
        return index, reference.keep_or_replace(target, draft, tokens, keeping, uniform)

    def _masses(
        self, scores: Tensor, rows: list[int], counts: list[int], purpose: Purpose
    ) -> tuple[Tensor, Tensor]:
        """Return the masses to sample from, int64 [rows, vocab], and random numbers, fp64 [rows]."""
        peaks, _ = reference.likeliest(scores)
        found = torch.empty(scores.shape, dtype=torch.int64, device=self._device)
        uniform = torch.empty(len(rows), dtype=torch.float64, device=self._device)
        for _, chosen, settings, width in self._groups(rows, counts, purpose):
            uniform[chosen] = settings.uniform
            tokens, masses = reference.kept_masses(scores[chosen], peaks[chosen], settings, width)
            found[chosen] = torch.zeros_like(found[chosen]).scatter_(1, tokens.expand_as(masses), masses)
        return found, uniform

    def _scores(
        self,
        logits: Tensor,
        rows: list[int],
        counts: list[int],
        masks: dict[int, Tensor],
        ahead: Mapping[int, Sequence[int]] = _NONE,
    ) -> Tensor:
        """Return the logits after penalties, biases, stop bans and masks; a copy if any of these applies."""
        if not masks and self._changing.isdisjoint(rows):
            return logits
        penalized = [place for place, row in enumerate(rows) if row in self._counts]
        biased, biases = self._table.biases(rows, counts)
        if not (penalized or biases or masks):
            return logits
        scores = logits.to(torch.float32, copy=True)
        if penalized:
            mine = [rows[place] for place in penalized]
            coming = [ahead.get(place, ()) for place in penalized] if ahead else None
            owners, tokens, seen = self._counts.read(mine, coming)
            strengths = self._table.penalties(mine)[:, owners]
            places = upload(penalized, self._device)[owners]
            apply_penalties(scores, places, tokens, seen, strengths)
        if biases:
            apply_biases(scores, biased, biases)
        if masks:
            apply_masks(scores, masks)
        return scores

    def _parameters(self, rows: list[int], counts: list[int]) -> tuple[Tensor | None, Kind]:
        """Return the GPU kernel's parameters, and the most expensive kind among the rows."""
        if self._demanding.isdisjoint(rows):
            return None, Kind.GREEDY
        parameters, most = self._table.parameters(rows, counts)
        return None if most is Kind.GREEDY else upload(parameters, self._device), most

    def _draw(
        self, scores: Tensor, rows: list[int], counts: list[int], raw: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens, and the numbers to copy to the host, as the GPU kernel does."""
        peaks, tokens = reference.likeliest(scores)
        for kind, chosen, settings, width in self._groups(rows, counts, Purpose.TOKEN):
            whole = len(chosen) == len(rows)  # selecting all rows would copy them
            some, tops = (scores, peaks) if whole else (scores[chosen], peaks[chosen])
            tokens[chosen] = (
                reference.draw_whole(some, tops, settings)
                if kind is Kind.WHOLE
                else reference.draw_ranked(some, tops, settings, width)
            )
        raw_peaks = peaks if raw is None else raw.amax(dim=-1).float()
        return tokens, _side_by_side(tokens, raw_peaks, peaks)

    def _groups(
        self, rows: list[int], counts: list[int], purpose: Purpose
    ) -> Iterator[tuple[Kind, Tensor, reference.Settings, int]]:
        """Yield the randomly sampled rows, grouped by kind of draw, in chunks that fit in memory.

        Each item is (kind, batch indices, settings, number of most likely tokens needed).
        """
        if self._demanding.isdisjoint(rows):
            return
        groups: dict[tuple[Kind, bool], list[int]] = {}
        for place, row in enumerate(rows):
            held = self._table[row]
            if held.kind is not Kind.GREEDY:
                groups.setdefault((held.kind, held.is_sorted), []).append(place)
        for (kind, _), places in groups.items():
            mine = [rows[place] for place in places]
            settings = self._table.settings(mine, [counts[place] for place in places], purpose)
            width, index = self._table.width(mine), upload(places, self._device)
            for part in chunks(len(places), self.vocab_size, self._device):
                yield kind, index[part], settings[part], width

    def _pending(self, logits: Tensor, rows: list[int], tokens: Tensor, numbers: Tensor) -> PendingSamples:
        """Begin one transfer to the host. `numbers`: tokens, highest logits before and after adjustment."""
        wanted: list[int] = []
        tops: list[int] = []
        if not self._measured.isdisjoint(rows):
            wanted = [place for place, row in enumerate(rows) if row in self._measured]
            tops = [min(self._table[rows[place]].params.logprobs or 0, self.vocab_size) for place in wanted]
            index, pieces = upload(wanted, self._device), [numbers]
            for part in chunks(len(wanted), self.vocab_size, self._device):
                chosen = index[part]
                pieces.append(measure(logits[chosen].float(), tokens[chosen], max(tops)).flatten())
            numbers = torch.cat(pieces)
        unpack = partial(_unpack, batch=len(rows), wanted=wanted, tops=tops)
        return PendingSamples(tokens, self.read_back(numbers), unpack)


def _side_by_side(*numbers: Tensor) -> Tensor:
    """Concatenate int64 and fp32 as fp64. NumPy takes a quarter of torch's time for so little data."""
    if numbers[0].device.type != "cpu":
        return torch.cat([x.double() for x in numbers])
    return torch.from_numpy(np.concatenate([x.numpy() for x in numbers], dtype=np.float64))


def _unpack(numbers: list[float], *, batch: int, wanted: list[int], tops: list[int]) -> _Samples:
    """Decode the tokens, the highest logits before and after adjustment, and requested log-probabilities."""
    tokens = list(map(int, numbers[:batch]))
    before = map(math.isfinite, numbers[batch : 2 * batch])
    finite = list(map(and_, before, map(math.isfinite, numbers[2 * batch : 3 * batch])))
    logprobs: list[TokenLogprobs | None] = [None] * batch
    stride = 4 + 2 * max(tops, default=0)
    for start, place, top in zip(range(3 * batch, len(numbers), stride), wanted, tops, strict=True):
        if finite[place]:
            logprobs[place] = read_logprobs(tokens[place], numbers[start : start + stride], top)
    return _Samples(tokens, finite, logprobs)
