"""SmoothQuant: outliers of the inputs are moved into the weights, so that both round well to 8 bits.

Source: Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language
Models", 2022, section 4, equations 3 and 4.
"""

import torch
from torch import Tensor

from kvq.formats.weights import WeightFormat
from kvq.kernels.linear.reference import rounded_inputs
from kvq.weights.awq import ChannelScales, over_tied
from kvq.weights.rounding import round_weight
from kvq.weights.statistics import InputStatistics

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def smooth_scales(
    weights: list[Tensor],
    statistics: InputStatistics,
    fmt: WeightFormat,
    dtype: torch.dtype,
    *,
    alphas: tuple[float, ...] = ALPHAS,
    tied: Tensor | None = None,
) -> ChannelScales:
    """Return s_j = max|x_j|^alpha / max|w_j|^(1 - alpha) of the best alpha, for layers that share inputs.

    Best is the least output error over the statistics' kept tokens, weights and inputs both rounded. With a
    single alpha nothing is tried, and scales always apply. `weights`: fp32 [out, in] each. `tied`: int64
    [in], inputs of one number get one scale.
    """
    rows = statistics.rows
    largest = over_tied(statistics.absmax, tied, "amax")
    columns = over_tied(torch.stack([weight.abs().amax(0) for weight in weights]).amax(0), tied, "amax")
    whole = max(sum(float((rows @ weight.T).square().sum()) for weight in weights), 1e-30)
    one = torch.ones_like(largest)
    unscaled = _error(weights, rows, fmt, dtype, one) / whole
    found = []
    for alpha in alphas:
        scale = _scale(largest, columns, alpha)
        error = _error(weights, rows, fmt, dtype, scale) / whole
        found.append(ChannelScales(scale=scale, alpha=alpha, error=error, unscaled=unscaled))
    if len(alphas) > 1:
        found.append(ChannelScales(scale=one, alpha=0.0, error=unscaled, unscaled=unscaled))
    return min(found, key=lambda one: one.error)


def _scale(largest: Tensor, columns: Tensor, alpha: float) -> Tensor:
    """Return the scales of equation 4; 1 if an input was always zero, or its weights are."""
    scale = largest**alpha / columns.clamp_min(1e-5) ** (1 - alpha)
    scale = torch.where((largest > 0) & (columns > 0), scale, 1.0)
    return scale.clamp(1e-5, 1e5)


def _error(
    weights: list[Tensor], rows: Tensor, fmt: WeightFormat, dtype: torch.dtype, scale: Tensor
) -> float:
    inputs = rounded_inputs(rows / scale, fmt.inputs)
    total = 0.0
    for weight in weights:
        stored = round_weight(weight * scale, fmt, dtype=dtype).dequantize().float()
        total += float((inputs @ stored.T - rows @ weight.T).square().sum())
    return total
