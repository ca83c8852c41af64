"""AWQ: inputs that matter get larger weights before rounding, and ranges are clipped where outputs gain.

Source: Lin et al., "AWQ: Activation-aware Weight Quantization for On-Device LLM Compression and
Acceleration", 2023, section 3.2; scales with the weights' magnitudes too as in the authors' published code.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvq.formats.weights import WeightFormat
from kvq.weights.rounding import round_weight
from kvq.weights.statistics import InputStatistics

_GRID = 20  # values of alpha in [0, 1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChannelScales:
    """Scales by which inputs are divided and a weight's columns multiplied."""

    scale: Tensor  # fp32 [in]
    alpha: float  # 0: all scales are 1
    error: float  # squared, of all outputs, relative to their square
    unscaled: float  # the same without scales


def awq_scales(
    weights: list[Tensor],
    statistics: InputStatistics,
    fmt: WeightFormat,
    dtype: torch.dtype,
    *,
    tied: Tensor | None = None,
) -> ChannelScales:
    """Return the scales of least output error for layers that share their inputs.

    s = mean|x|^alpha and s = mean|x|^alpha / mean|w|^(1 - alpha), each over a grid of alpha, normed to
    sqrt(max s * min s) = 1. The error is that over all tokens of the statistics, after rounding to
    nearest; clipping comes once scales are chosen (searched together it gained nothing).

    `weights`: fp32 [out, in] each. `tied`: int64 [in], inputs of one number get one scale, as the
    query heads of one KV head must.
    """
    activity = over_tied(statistics.absmean, tied, "mean")
    magnitude = over_tied(_relative_magnitude(weights, fmt), tied, "mean")
    whole = sum(statistics.squared(weight) for weight in weights)
    one = torch.ones_like(activity)
    unscaled = _error(weights, statistics, fmt, dtype, one) / max(whole, 1e-30)
    best = ChannelScales(scale=one, alpha=0.0, error=unscaled, unscaled=unscaled)
    for step in range(1, _GRID):
        alpha = step / _GRID
        for scale in (_normed(activity**alpha), _normed(activity**alpha / magnitude ** (1 - alpha))):
            error = _error(weights, statistics, fmt, dtype, scale) / max(whole, 1e-30)
            if error < best.error:
                best = ChannelScales(scale=scale, alpha=alpha, error=error, unscaled=unscaled)
    return best


def _error(
    weights: list[Tensor], statistics: InputStatistics, fmt: WeightFormat, dtype: torch.dtype, scale: Tensor
) -> float:
    """Return the squared error of the outputs with scaled weights rounded to nearest."""
    total = 0.0
    for weight in weights:
        stored = round_weight(weight * scale, fmt, dtype=dtype)
        total += statistics.squared(stored.dequantize().float() / scale - weight)
    return total


def _relative_magnitude(weights: list[Tensor], fmt: WeightFormat) -> Tensor:
    """Return the mean over rows of |w| relative to the largest of its group, fp32 [in]."""
    parts = []
    for weight in weights:
        groups = weight.abs().view(weight.shape[0], fmt.groups(weight.shape[1]), -1)
        parts.append((groups / groups.amax(-1, keepdim=True).clamp_min(1e-12)).flatten(1))
    return torch.cat(parts).mean(0).clamp_min(1e-4)


def over_tied(values: Tensor, tied: Tensor | None, reduce: str) -> Tensor:
    """Return every value, or the mean or the largest ("amax") of the values tied with it."""
    if tied is None:
        return values
    found = torch.zeros(int(tied.max()) + 1, device=values.device)
    return found.scatter_reduce_(0, tied, values, reduce, include_self=False)[tied]


def _normed(scale: Tensor) -> Tensor:
    """Return scales around 1, at least 1e-4 of the largest for inputs that are always zero."""
    scale = scale.clamp_min(1e-4 * float(scale.max()) + 1e-30)
    return scale / (scale.max() * scale.min()).sqrt()
