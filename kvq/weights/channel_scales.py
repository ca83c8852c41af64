"""AWQ and SmoothQuant: inputs are divided by scales, and weight columns are multiplied by the scales.

AWQ enlarges the weights of important inputs before rounding, and clips ranges where this reduces the output
error. SmoothQuant shifts input outliers into the weights, so that both can be rounded to 8 bits.

Sources: Lin et al., "AWQ: Activation-aware Weight Quantization for On-Device LLM Compression and
Acceleration", 2023, section 3.2; scales that also use weight magnitudes follow the authors' published code.
Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models", 2022,
section 4, equations 3 and 4.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvq.formats.weights import WeightFormat
from kvq.kernels.linear.reference import rounded_inputs
from kvq.weights.rounding import round_weight
from kvq.weights.statistics import InputStatistics

_GRID = 20  # values of AWQ's alpha in [0, 1)
ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # SmoothQuant's


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChannelScales:
    """Scales by which inputs are divided and a weight's columns multiplied."""

    scale: Tensor  # fp32 [in]
    alpha: float  # 0: all scales are 1
    error: float  # squared error of all outputs, relative to their squared norm
    unscaled: float  # the same without scales


def awq_scales(
    weights: list[Tensor],
    statistics: InputStatistics,
    fmt: WeightFormat,
    dtype: torch.dtype,
    *,
    tied: Tensor | None = None,
) -> ChannelScales:
    """Return the scales that minimize the output error of layers that share their inputs.

    Tries s = mean|x|^alpha and s = mean|x|^alpha / mean|w|^(1 - alpha), each over a grid of alpha, normalized
    to sqrt(max s * min s) = 1. The error is measured over all tokens of the statistics, after rounding to
    nearest. Clipping is a later, separate step (a joint search gained nothing).

    `weights`: fp32 [out, in] each. `tied`: int64 [in]; inputs with the same number share a scale, as required
    for the query heads of one KV head.
    """
    activity = _over_tied(statistics.absmean, tied, "mean")
    magnitude = _over_tied(_relative_magnitude(weights, fmt), tied, "mean")
    whole = max(sum(statistics.squared(weight) for weight in weights), 1e-30)

    def error(scale: Tensor) -> float:
        stored = (round_weight(weight * scale, fmt, dtype=dtype).dequantize().float() for weight in weights)
        changes = (own / scale - weight for own, weight in zip(stored, weights, strict=True))
        return sum(map(statistics.squared, changes)) / whole

    one = torch.ones_like(activity)
    unscaled = error(one)
    best = ChannelScales(scale=one, alpha=0.0, error=unscaled, unscaled=unscaled)
    for step in range(1, _GRID):
        alpha = step / _GRID
        for scale in (_normed(activity**alpha), _normed(activity**alpha / magnitude ** (1 - alpha))):
            if (found := error(scale)) < best.error:
                best = ChannelScales(scale=scale, alpha=alpha, error=found, unscaled=unscaled)
    return best


def _relative_magnitude(weights: list[Tensor], fmt: WeightFormat) -> Tensor:
    """Return the mean over rows of |w| divided by the largest |w| in its group, fp32 [in]."""
    parts = []
    for weight in weights:
        groups = weight.abs().view(weight.shape[0], fmt.groups(weight.shape[1]), -1)
        parts.append((groups / groups.amax(-1, keepdim=True).clamp_min(1e-12)).flatten(1))
    return torch.cat(parts).mean(0).clamp_min(1e-4)


def _over_tied(values: Tensor, tied: Tensor | None, reduce: str) -> Tensor:
    """Replace each of `values` with the mean or maximum ("amax") of the values tied to it."""
    if tied is None:
        return values
    found = torch.zeros(int(tied.max()) + 1, device=values.device, dtype=torch.float32)
    return found.scatter_reduce_(0, tied, values, reduce, include_self=False)[tied]


def _normed(scale: Tensor) -> Tensor:
    """Return scales normalized around 1, none below 1e-4 of the largest, even if an input is always zero."""
    scale = scale.clamp_min(1e-4 * float(scale.max()) + 1e-30)
    return scale / (scale.max() * scale.min()).sqrt()


def smooth_scales(
    weights: list[Tensor],
    statistics: InputStatistics,
    fmt: WeightFormat,
    dtype: torch.dtype,
    *,
    alphas: tuple[float, ...] = ALPHAS,
    tied: Tensor | None = None,
) -> ChannelScales:
    """Return s_j = max|x_j|^alpha / max|w_j|^(1 - alpha) with the best alpha, for layers that share inputs.

    The best alpha minimizes the output error over the tokens that the statistics keep, with weights and
    inputs rounded. A single alpha in `alphas` is always used. `weights`: fp32 [out, in] each. `tied`: int64
    [in]; inputs with the same number share a scale.
    """
    rows = statistics.rows
    largest = _over_tied(statistics.absmax, tied, "amax")
    columns = _over_tied(torch.stack([weight.abs().amax(0) for weight in weights]).amax(0), tied, "amax")
    whole = max(sum(float((rows @ weight.T).square().sum()) for weight in weights), 1e-30)

    def error(scale: Tensor) -> float:
        inputs, total = rounded_inputs(rows / scale, fmt.inputs), 0.0
        for weight in weights:
            stored = round_weight(weight * scale, fmt, dtype=dtype).dequantize().float()
            total += float((inputs @ stored.T - rows @ weight.T).square().sum())
        return total / whole

    one = torch.ones_like(largest)
    unscaled = error(one)
    found = []
    for alpha in alphas:
        scale = largest**alpha / columns.clamp_min(1e-5) ** (1 - alpha)  # equation 4
        # The scale is 1 if an input was always zero, or all its weights are
        scale = torch.where((largest > 0) & (columns > 0), scale, 1.0).clamp(1e-5, 1e5)
        found.append(ChannelScales(scale=scale, alpha=alpha, error=error(scale), unscaled=unscaled))
    if len(alphas) > 1:
        found.append(ChannelScales(scale=one, alpha=0.0, error=unscaled, unscaled=unscaled))
    return min(found, key=lambda one: one.error)
