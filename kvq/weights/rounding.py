"""Round-to-nearest quantization: scales and zero points of groups, and the resulting codes.

A smaller range clips a group's largest weights and rounds the others more finely; `search_scales` finds the
best range. Sources: Jacob et al., "Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference", 2018, section 2.1; Lin et al., "AWQ: Activation-aware Weight Quantization
for On-Device LLM Compression and Acceleration", 2023, section 3.2 (weight clipping); Frantar et al., "GPTQ",
2022, whose published code has a search over squared errors.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvq.formats.weights import WeightCode, WeightFormat
from kvq.kernels.codec import e4m3
from kvq.kernels.weight import QuantizedWeight

_SMALLEST_SCALE = 2.0**-24


def scales_of(
    weight: Tensor, fmt: WeightFormat, dtype: torch.dtype, *, shrink: float = 1.0
) -> tuple[Tensor, Tensor | None]:
    """Return scales in `dtype` and zero points int8 (None if symmetric), [out, groups], for fp32 [out, in].

    Symmetric codes use all 2^bits values: the largest magnitude is half a step beyond the last value, as in
    GPTQ and compressed-tensors. Asymmetric codes span a group's minimum to its maximum, including zero. The
    largest value of FP8 is 448. `shrink` scales the range; weights outside it are clipped.
    """
    groups = weight.float().view(weight.shape[0], fmt.groups(weight.shape[1]), -1)
    if fmt.symmetric:
        largest = e4m3.LARGEST if fmt.code is WeightCode.FP8 else 2 ** (fmt.code.bits - 1) - 0.5
        return _stored(groups.abs().amax(-1) * (shrink / largest), dtype), None
    low, high = groups.amin(-1).clamp(max=0) * shrink, groups.amax(-1).clamp(min=0) * shrink
    scale = _stored((high - low) / (2**fmt.code.bits - 1), dtype)
    half = 2 ** (fmt.code.bits - 1)
    zero = (-half - (low / scale.float()).round()).clamp(-half, half - 1)
    return scale, zero.to(torch.int8)


def codes_of(weight: Tensor, scale: Tensor, zero: Tensor | None, fmt: WeightFormat) -> Tensor:
    """Return the nearest codes, int8 [out, in] (for FP8, E4M3FN bytes as uint8), for a weight [out, in]."""
    groups = weight.float().view(*scale.shape, -1) / scale.float()[:, :, None]
    if fmt.code is WeightCode.FP8:
        return e4m3.encode(groups.flatten(1))
    half = 2 ** (fmt.code.bits - 1)
    q = groups.round()
    if zero is not None:
        q = q + zero[:, :, None]
    return q.clamp(-half, half - 1).flatten(1).to(torch.int8)


def round_weight(weight: Tensor, fmt: WeightFormat, *, dtype: torch.dtype | None = None) -> QuantizedWeight:
    """Quantize a weight [out, in] to the nearest codes; `dtype`: dtype of the scales (default: the weight's).

    Raises:
        ConfigError: the format's groups don't divide the inputs.
    """
    scale, zero = scales_of(weight, fmt, dtype or weight.dtype)
    return QuantizedWeight.pack(fmt, codes_of(weight, scale, zero, fmt), scale, zero)


def _stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scales as stored: neither zero nor infinite, and 1 for a group of zeros."""
    limit = torch.finfo(dtype).max
    return torch.where(scale > 0, scale.clamp(_SMALLEST_SCALE, limit), 1.0).to(dtype)


Cost = Callable[[Tensor], Tensor]  # errors [out, groups, inputs of a group] -> cost [out, groups]
_SHRINKS = tuple(1 - 0.025 * step for step in range(-4, 17))  # 1.1 down to 0.6 of the range


def squares(error: Tensor) -> Tensor:
    """Return the squared error of the weights."""
    return error.square().sum(-1)


def weighted(importance: Tensor) -> Cost:
    """Return the squared error of weights as a cost, with inputs weighted by `importance` [in]."""

    def cost(error: Tensor) -> Tensor:
        return (error.square() * importance.view(error.shape[1], -1)).sum(-1)

    return cost


def quadratic(gram: Tensor, groups: int) -> Cost:
    """Return the squared output error caused by each group as a cost; `gram`: sum of x x^T, [in, in]."""
    size = gram.shape[0] // groups
    at = torch.arange(groups, device=gram.device)
    blocks = gram.view(groups, size, groups, size)[at, :, at]  # [groups, inputs, inputs]

    def cost(error: Tensor) -> Tensor:
        by_group = error.transpose(0, 1)  # [groups, out, inputs]
        return ((by_group @ blocks) * by_group).sum(-1).T

    return cost


def search_scales(
    weight: Tensor, fmt: WeightFormat, dtype: torch.dtype, cost: Cost | None
) -> tuple[Tensor, Tensor | None]:
    """Return scales and zero points like `scales_of`, with each group's range chosen to minimize the cost."""
    weight = weight.float()
    scale, zero = scales_of(weight, fmt, dtype)
    if cost is None:
        return scale, zero
    least = cost(_error(weight, fmt, scale, zero))
    for shrink in _SHRINKS:
        if shrink == 1:
            continue
        other, other_zero = scales_of(weight, fmt, dtype, shrink=shrink)
        found = cost(_error(weight, fmt, other, other_zero))
        better = found < least
        least = torch.where(better, found, least)
        scale = torch.where(better, other, scale)
        if zero is not None and other_zero is not None:
            zero = torch.where(better, other_zero, zero)
    return scale, zero


def clip_weight(weight: Tensor, fmt: WeightFormat, dtype: torch.dtype, gram: Tensor) -> QuantizedWeight:
    """Round to nearest, with each group's range clipped for the least output error; `gram`: sum of x x^T."""
    scale, zero = search_scales(weight, fmt, dtype, quadratic(gram, fmt.groups(weight.shape[1])))
    return QuantizedWeight.pack(fmt, codes_of(weight, scale, zero, fmt), scale, zero)


def _error(weight: Tensor, fmt: WeightFormat, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Return the rounding error, [out, groups, inputs of a group]."""
    groups = weight.view(*scale.shape, -1)
    q = codes_of(weight, scale, zero, fmt).view(groups.shape).float()
    if zero is not None:
        q -= zero[:, :, None]
    return q.mul_(scale.float()[:, :, None]).sub_(groups)
