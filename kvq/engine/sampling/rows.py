"""Row table: parameters of all rows in use, from which each step selects the rows it needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvq.engine.device.transfers import upload
from kvq.engine.params import SamplingParams
from kvq.engine.sampling.penalties import Bias
from kvq.engine.sampling.seeds import Purpose, seed_words, uniforms
from kvq.kernels.draw.parameters import COLUMNS, KIND, UNIFORM, Kind, packed
from kvq.kernels.draw.reference import Settings

# Up to this top_k, a row shares a selection with others; above, it sorts without slowing down other rows.
_SHORT_TOP_K = 1024
_LOWEST_TEMPERATURE = 2.0**-126  # smallest normal fp32; in effect, the most likely token is selected

# Columns of the table, named as in SamplingParams.
_FILTERS = tuple(field.name for field in fields(Settings) if field.name not in ("uniform", "temperature"))
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_COLUMNS = ("temperature", *_FILTERS, *_PENALTIES)
_TOP_K = _COLUMNS.index("top_k")


@dataclass(frozen=True, slots=True)
class _Row:
    """Parameters of one row in use."""

    params: SamplingParams
    kind: Kind
    is_sorted: bool  # ranks the whole vocabulary where PyTorch draws; equal rows are drawn together
    bias: Bias | None
    forbidden: Bias | None  # until params.min_tokens tokens are generated

    @property
    def repeats(self) -> bool:
        """True if the row's tokens must be the same as without drafts, because it is greedy or has a seed.

        A draft for such a row is compared with the token that the row samples in any case.
        """
        return self.kind is Kind.GREEDY or self.params.seed is not None

    @property
    def wants_logprobs(self) -> bool:
        """True if the log-probability of the chosen token is needed, by the user or to rank samples."""
        return self.params.logprobs is not None or self.params.best_of is not None

    @property
    def changes_logits(self) -> bool:
        """True if penalties, a bias or a ban change the row's logits, even if only for its first tokens."""
        return self.params.has_penalties or self.bias is not None or self.forbidden is not None

    @property
    def is_plain(self) -> bool:
        """True if the row needs only its most likely token."""
        return self.kind is Kind.GREEDY and not self.changes_logits and not self.wants_logprobs


class RowTable:
    """Rows in use, with their parameters in a table: [max_rows, columns], fp64, on the host.

    A step has to upload its random numbers anyway. The parameters of its rows are uploaded in the same copy,
    which is cheaper than selecting them on the device.
    """

    def __init__(self, *, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._rows: list[_Row | None] = [None] * max_rows
        self._numbers = np.zeros((max_rows, len(_COLUMNS)), dtype=np.float64)
        self._plain = np.array(self._numbers_of(SamplingParams()))  # for rows without filters
        self._lines = np.zeros((max_rows, COLUMNS), dtype=np.int64)  # parameters of the GPU kernels
        self._seeds = np.zeros(max_rows, dtype=np.uint64)

    def __getitem__(self, row: int) -> _Row:
        held = self._rows[row]
        assert held is not None, f"row {row} isn't in use"
        return held

    def __contains__(self, row: int) -> bool:
        return self._rows[row] is not None

    def add(self, row: int, params: SamplingParams, *, seed: int, stop_ids: Sequence[int]) -> _Row:
        """Add an unused row to the rows in use."""
        assert self._rows[row] is None, f"row {row} is in use already"
        self._numbers[row] = self._numbers_of(params)
        self._seeds[row] = seed_words([seed])[0]
        stops = {token for token in stop_ids if token < self._vocab_size} if params.min_tokens else ()
        kind, top_k = self._kind(params), self._top_k(params)
        held = _Row(
            params=params,
            kind=kind,
            is_sorted=kind is Kind.RANKED and top_k > min(_SHORT_TOP_K, self._vocab_size - 1),
            bias=self._bias(params.logit_bias or {}),
            forbidden=self._bias(dict.fromkeys(stops, -np.inf)),
        )
        self._rows[row] = held
        self._lines[row] = packed(
            kind,
            temperature=max(params.temperature, _LOWEST_TEMPERATURE),
            min_p=params.min_p,
            top_k=top_k,
            top_p=params.top_p,
        )
        return held

    def remove(self, row: int) -> None:
        """Remove a row from the rows in use."""
        assert self._rows[row] is not None, f"row {row} isn't in use"
        self._rows[row] = None

    def settings(
        self, rows: Sequence[int], counts: Sequence[int], purpose: Purpose = Purpose.TOKEN
    ) -> Settings:
        """Return the settings for sampling `rows` after `counts` generated tokens, on the device."""
        numbers = self._numbers[rows, : 1 + len(_FILTERS)]
        first = uniforms(self._seeds[rows], counts, purpose)[None]
        sent = upload(np.concatenate((first, numbers.T)), self._device, torch.float64)  # [2 + filters, rows]
        uniform, temperature, *filters = sent
        asked = (numbers != self._plain[: numbers.shape[1]]).any(axis=0)[1:]  # [filters]
        named = zip(_FILTERS, filters, asked, strict=True)
        return Settings(
            uniform=uniform,
            temperature=temperature.float(),
            **{name: values if is_asked else None for name, values, is_asked in named},
        )

    def keeping(self, rows: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Return random numbers that decide whether drafts stay: fp64 [rows], in [0, 1), on the device."""
        return upload(uniforms(self._seeds[rows], counts, Purpose.KEEPING), self._device, torch.float64)

    def parameters(self, rows: Sequence[int], counts: Sequence[int]) -> tuple[npt.NDArray[np.int64], Kind]:
        """Return the GPU kernels' parameters, [rows, COLUMNS], and the most expensive kind among the rows."""
        lines = self._lines[rows]
        lines[:, UNIFORM] = uniforms(self._seeds[rows], counts).view(np.int64)
        return lines, Kind(int(lines[:, KIND].max()))

    def width(self, rows: Sequence[int]) -> int:
        """Return how many of the most likely tokens are enough to include all that `rows` may sample."""
        return int(self._numbers[rows, _TOP_K].max())

    def penalties(self, rows: Sequence[int]) -> Tensor:
        """Return repetition, presence and frequency penalties: fp32, [3, rows], on the device."""
        return upload(self._numbers[rows, -len(_PENALTIES) :].T, self._device, torch.float32)

    def biases(self, rows: Sequence[int], counts: Sequence[int]) -> tuple[list[int], list[Bias]]:
        """Return the indices of `rows` that have biases after `counts` tokens, and the biases."""
        places, biases = [], []
        for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
            held = self[row]
            if held.bias is not None:
                places.append(place)
                biases.append(held.bias)
            if held.forbidden is not None and count < held.params.min_tokens:
                places.append(place)
                biases.append(held.forbidden)
        return places, biases

    def _numbers_of(self, params: SamplingParams) -> list[float]:
        """Return the table row for these parameters."""
        given = {name: getattr(params, name) for name in _COLUMNS}
        given["temperature"] = max(params.temperature, _LOWEST_TEMPERATURE)
        given["top_k"] = self._top_k(params)
        return list(given.values())

    def _top_k(self, params: SamplingParams) -> int:
        return min(params.top_k or self._vocab_size, self._vocab_size)

    def _kind(self, params: SamplingParams) -> Kind:
        if params.is_greedy:
            return Kind.GREEDY
        return Kind.RANKED if self._top_k(params) < self._vocab_size or params.top_p < 1 else Kind.WHOLE

    def _bias(self, amounts: Mapping[int, float]) -> Bias | None:
        if not amounts:
            return None
        tokens = upload(list(amounts), self._device)
        return tokens, upload(list(amounts.values()), self._device, torch.float32)
