"""Scales of groups by search: a smaller range clips a group's largest weights and rounds the others finer.

Source: Lin et al., "AWQ: Activation-aware Weight Quantization for On-Device LLM Compression and
Acceleration", 2023, section 3.2 (weight clipping); Frantar et al., "GPTQ", 2022, whose published code has
a search over squared errors.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvq.formats.weights import WeightFormat
from kvq.kernels.linear.weight import QuantizedWeight
from kvq.weights.rounding import codes_of, scales_of

Cost = Callable[[Tensor], Tensor]  # errors [out, groups, inputs of a group] -> cost [out, groups]
_SHRINKS = tuple(1 - 0.025 * step for step in range(-4, 17))  # 1.1 down to 0.6 of the range


def squares(error: Tensor) -> Tensor:
    """Squared error of the weights."""
    return error.square().sum(-1)


def weighted(importance: Tensor) -> Cost:
    """Squared error of the weights, each input weighted: `importance` [in], such as E[x^2]."""

    def cost(error: Tensor) -> Tensor:
        return (error.square() * importance.view(error.shape[1], -1)).sum(-1)

    return cost


def quadratic(gram: Tensor, groups: int) -> Cost:
    """Squared error of a group's part of the outputs, `gram` [in, in] being the sum of x x^T."""
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
    """Scales and zero points as `scales_of` makes them, each group with the range of least cost, if any."""
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
    """Round to nearest under the ranges of least output error, group by group; `gram` [in, in]."""
    scale, zero = search_scales(weight, fmt, dtype, quadratic(gram, fmt.groups(weight.shape[1])))
    return QuantizedWeight.pack(fmt, codes_of(weight, scale, zero, fmt), scale, zero)


def _error(weight: Tensor, fmt: WeightFormat, scale: Tensor, zero: Tensor | None) -> Tensor:
    """What rounding changes, [out, groups, inputs of a group]."""
    groups = weight.view(*scale.shape, -1)
    q = codes_of(weight, scale, zero, fmt).view(groups.shape).float()
    if zero is not None:
        q -= zero[:, :, None]
    return q.mul_(scale.float()[:, :, None]).sub_(groups)
