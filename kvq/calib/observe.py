"""Observation of a model's unquantized K and V, through the same attention as in serving."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvq.errors import RequestError
from kvq.evals.side_by_side import one_by_one
from kvq.evals.text import EvalText, begin_ids, cut_windows, spread, text_ids
from kvq.evals.watch import Progress
from kvq.formats import SMALLEST_MAXIMUM, Centers, HeadMaxima, LayerCenters, StaticScales
from kvq.formats.calibrated import HeadCenters
from kvq.kernels.codec import rotate
from kvq.models import Model
from kvq.models.loading.prepared import PreparedModel

_PER_OCTAVE = 32  # a bin is 2.2% wide
_LOWEST, _HIGHEST = -40, 40  # powers of two spanned by the bins; smaller elements count as zero
_BINS = (_HIGHEST - _LOWEST) * _PER_OCTAVE + 1  # the first is for smaller elements


class _Magnitudes:
    """Absolute values of a head's elements: maximum, percentiles, and the best clip for symmetric codes.

    Values are counted in logarithmic bins, in one pass, without knowing their range in advance.
    """

    def __init__(self, heads: int) -> None:
        self.absmax = torch.zeros(heads, dtype=torch.float32)  # [heads]
        self._counts = torch.zeros(heads, _BINS, dtype=torch.int64)

    def update(self, rows: Tensor) -> None:
        """Add rows [tokens, heads, dim]."""
        size = rows.abs().float()
        self.absmax = torch.maximum(self.absmax, size.amax(dim=(0, 2)).cpu())
        heads = size.shape[1]
        bins = (size.log2() * _PER_OCTAVE).floor() - (_LOWEST * _PER_OCTAVE - 1)
        bins = bins.nan_to_num(0.0).clamp(0, _BINS - 1).long()  # [tokens, heads, dim]
        flat = (bins + torch.arange(heads, device=bins.device)[:, None] * _BINS).flatten()
        self._counts += torch.bincount(flat, minlength=heads * _BINS).view(heads, _BINS).cpu()

    def percentile(self, share: float) -> list[float]:
        """Return, per head, the magnitude not exceeded by a `share` (0 to 1) of elements, to within a bin."""
        reached = self._counts.cumsum(1).double() / self._counts.sum(1, keepdim=True)
        index = (reached < share).sum(1).clamp(max=_BINS - 1)
        return torch.minimum(_edges()[index + 1].float(), self.absmax).tolist()

    def least_squares_clip(self, levels: int) -> list[float]:
        """Return, for each head, the best clipping magnitude c for symmetric codes of +-`levels`.

        This c minimizes the squared error: (c / levels)^2 / 12 for each element up to c, (|x| - c)^2 for each
        larger one. Source of the idea: Choi et al. 2018, PACT; here, the edges of all bins are tried.
        """
        middle = (_edges()[:-1] + _edges()[1:]) / 2  # [bins]
        counts = self._counts.double()
        clips = _edges()[1:]
        inside = counts.cumsum(1)  # [heads, bins], elements of at most the bin's upper edge
        beyond = counts.sum(1, keepdim=True) - inside
        first = (counts * middle).flip(1).cumsum(1).flip(1) - counts * middle
        second = (counts * middle**2).flip(1).cumsum(1).flip(1) - counts * middle**2
        saturated = second - 2 * clips * first + clips**2 * beyond
        error = inside * (clips / levels) ** 2 / 12 + saturated
        best = clips[error.argmin(1)]
        return torch.minimum(best.float(), self.absmax).tolist()


def _edges() -> Tensor:
    """Return the lower edges of all bins and the upper edge of the last bin, fp64 [bins + 1]."""
    exponents = torch.arange(_BINS, dtype=torch.float64) / _PER_OCTAVE + _LOWEST
    return torch.cat((torch.zeros(1, dtype=torch.float64), 2.0**exponents))


class _RowStatistics:
    """Statistics of K or V of one layer, per head, or per head and channel."""

    def __init__(self, kv_heads: int, dim: int) -> None:
        self.magnitudes = _Magnitudes(kv_heads)  # of the elements
        self.rotated = _Magnitudes(kv_heads)  # after the Hadamard rotation
        self.total = torch.zeros(kv_heads, dim, dtype=torch.float64)  # sum over tokens
        self.squares = torch.zeros_like(self.total)  # sum of squares
        self.tokens = 0

    def update(self, rows: Tensor) -> None:
        """Add rows [tokens, kv_heads, dim]."""
        rows = rows.float()
        self.magnitudes.update(rows)
        self.rotated.update(rotate(rows))
        self.total += rows.double().sum(0).cpu()
        self.squares += rows.double().square().sum(0).cpu()
        self.tokens += rows.shape[0]

    @property
    def mean(self) -> Tensor:
        """Mean over tokens, fp64 [kv_heads, dim]."""
        return self.total / self.tokens

    @property
    def rms(self) -> Tensor:
        """Root mean square over tokens, fp64 [kv_heads, dim]."""
        return (self.squares / self.tokens).sqrt()

    @property
    def std(self) -> Tensor:
        """Standard deviation over tokens, fp64 [kv_heads, dim]."""
        return (self.squares / self.tokens - self.mean.square()).clamp_min(0).sqrt()


@dataclass(frozen=True, kw_only=True, slots=True)
class Observations:
    """Statistics of every layer's K and V over a text."""

    model_digest: str
    text: EvalText
    tokens: int
    layers: tuple[dict[str, _RowStatistics], ...]  # "k" and "v"
    can_center_k: bool  # False if the model caps its scores

    def scales(self) -> StaticScales:
        """Return the absolute maxima per head, for static formats."""
        layers = tuple(
            HeadMaxima(
                k=_maxima(layer["k"].magnitudes),
                v=_maxima(layer["v"].magnitudes),
                k_rotated=_maxima(layer["k"].rotated),
                v_rotated=_maxima(layer["v"].rotated),
            )
            for layer in self.layers
        )
        return StaticScales(**self._origin, layers=layers)

    def centers(self) -> Centers:
        """Return the means per channel, for grouped formats; K has none if the model caps its scores."""
        layers = tuple(
            LayerCenters(
                k=_rounded(layer["k"].mean) if self.can_center_k else None, v=_rounded(layer["v"].mean)
            )
            for layer in self.layers
        )
        return Centers(**self._origin, layers=layers)

    @property
    def _origin(self) -> dict[str, Any]:
        return {"model_digest": self.model_digest, "text_digest": self.text.digest, "tokens": self.tokens}


def observe(
    model: Model,
    text: EvalText | str,
    *,
    context: int | None = None,
    max_windows: int = 32,
    progress: Progress = lambda done, total: None,
) -> Observations:
    """Observe K (after RoPE) and V of every layer while the model runs over a text with unquantized KV.

    A session runs the model, so the observed values are the same as in serving. At most `max_windows`
    windows of `context` tokens are used, spread evenly over the text; a text shorter than one window is used
    in full. `context` defaults to 1,024 tokens or the model's maximum.

    Raises:
        RequestError: the text has fewer than two tokens, `context` exceeds the model's maximum, `max_windows`
            is below 1, or K or V are not finite.
    """
    if isinstance(text, str):
        text = EvalText(name="text", text=text)
    windows = spread_windows(model.prepared, text.text, context=context, max_windows=max_windows)
    layers = tuple(
        {"k": _RowStatistics(one.kv_heads, one.k_head_dim), "v": _RowStatistics(one.kv_heads, one.v_head_dim)}
        for one in model.geometry.layers
    )
    session = model.with_kv("fp32").session(max_tokens=len(windows[0]))

    def take(layer: int, k: Tensor, v: Tensor) -> None:
        layers[layer]["k"].update(k)
        layers[layer]["v"].update(v)

    session.observer = take
    for done in one_by_one(session, windows):
        progress(done, len(windows))
    return Observations(
        model_digest=model.weights.digest,
        text=text,
        tokens=sum(map(len, windows)),
        layers=layers,
        can_center_k=model.geometry.softcap is None,
    )


def calibrate(
    model: Model,
    text: EvalText | str,
    *,
    context: int | None = None,
    max_windows: int = 32,
    progress: Progress = lambda done, total: None,
) -> StaticScales:
    """Return static scales from a run over a text; see `observe`."""
    return observe(model, text, context=context, max_windows=max_windows, progress=progress).scales()


def spread_windows(
    model: PreparedModel, text: str, *, context: int | None = None, max_windows: int = 32
) -> list[list[int]]:
    """Return windows of `context` tokens, spread evenly over a text; see `observe`.

    Raises:
        RequestError: the text has fewer than two tokens, or `context` or `max_windows` is out of range.
    """
    if max_windows < 1:
        raise RequestError(f"the number of windows must be at least 1, got {max_windows}")
    limit = model.max_context
    context = min(1024, limit) if context is None else context
    if not 2 <= context <= limit:
        raise RequestError(f"a context of {context} tokens was asked for; this model takes 2 to {limit}")
    ids, prefix = text_ids(model.tokenizer, text), begin_ids(model.tokenizer)
    return spread(cut_windows(ids, prefix, context=max(2, min(context, len(ids) + len(prefix)))), max_windows)


def _maxima(magnitudes: _Magnitudes) -> tuple[float, ...]:
    return tuple(max(x, SMALLEST_MAXIMUM) for x in magnitudes.absmax.tolist())


def _rounded(rows: Tensor) -> HeadCenters:
    """Round to six digits, which is more precise than any code and halves the file size."""
    return tuple(tuple(float(f"{x:.6g}") for x in row) for row in rows.tolist())


_OUTLIER = 4.0  # times the median channel's root mean square
_BIAS = 2.0  # in standard deviations, and times the median channel's root mean square


def summarize(observations: Observations) -> list[dict[str, Any]]:
    """Return the rows of `kvq calibrate --json`: one per layer, K or V, and head."""
    return [
        row
        for index, layer in enumerate(observations.layers)
        for part in ("k", "v")
        for row in _heads(index, part, layer[part])
    ]


def _heads(index: int, part: str, seen: _RowStatistics) -> list[dict[str, Any]]:
    plain, rotated = seen.magnitudes, seen.rotated
    percentiles = [plain.percentile(share) for share in (0.99, 0.999, 0.9999)]
    clips, rotated_clips = plain.least_squares_clip(127), rotated.least_squares_clip(127)
    middle = seen.rms.median(dim=1, keepdim=True).values.clamp_min(1e-30)  # [heads, 1]
    outlying = seen.rms / middle
    bias = seen.mean.abs()
    is_biased = (bias >= _BIAS * seen.std) & (bias >= _BIAS * middle)
    return [
        {
            **{"layer": index, "part": part, "head": head},
            "absmax": float(plain.absmax[head]),
            "p99": percentiles[0][head],  # magnitude that 99% of the elements do not exceed
            "p999": percentiles[1][head],
            "p9999": percentiles[2][head],
            "clip_int8": clips[head],  # least squared error for 8-bit symmetric codes
            "absmax_rotated": float(rotated.absmax[head]),
            "clip_int8_rotated": rotated_clips[head],
            "outlier_channels": (outlying[head] >= _OUTLIER).nonzero().flatten().tolist(),
            "biased_channels": is_biased[head].nonzero().flatten().tolist(),
            "largest_outlier": float(outlying[head].max()),  # root mean square / the median channel's
            "largest_bias": float((bias / middle)[head].max()),  # channel mean, in the same unit
        }
        for head in range(seen.rms.shape[0])
    ]
