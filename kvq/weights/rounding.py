"""Round-to-nearest: scales and zero points of groups, and codes under given ones.

Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
Inference", 2018, section 2.1.
"""

import torch
from torch import Tensor

from kvq.formats.weights import WeightCode, WeightFormat
from kvq.kernels.codec import e4m3
from kvq.kernels.linear.weight import QuantizedWeight

_SMALLEST_SCALE = 2.0**-24


def scales_of(
    weight: Tensor, fmt: WeightFormat, dtype: torch.dtype, *, shrink: float = 1.0
) -> tuple[Tensor, Tensor | None]:
    """Scale of `dtype` and zero point int8 (None if symmetric), both [out, groups], of fp32 [out, in].

    Symmetric codes take all 2^bits values: the largest magnitude lies half a step beyond the last one, as
    GPTQ and compressed-tensors have it. Asymmetric ones take the range between a group's minimum and
    maximum, zero included. FP8's largest value is 448. `shrink` scales that range: weights beyond it are
    clipped.
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
    """Nearest codes int8 [out, in] (of FP8 E4M3FN bytes, uint8) of fp32 [out, in] under given scales."""
    groups = weight.float().view(*scale.shape, -1) / scale.float()[:, :, None]
    if fmt.code is WeightCode.FP8:
        return e4m3.encode(groups.flatten(1))
    half = 2 ** (fmt.code.bits - 1)
    q = groups.round()
    if zero is not None:
        q = q + zero[:, :, None]
    return q.clamp(-half, half - 1).flatten(1).to(torch.int8)


def round_weight(weight: Tensor, fmt: WeightFormat, *, dtype: torch.dtype | None = None) -> QuantizedWeight:
    """Quantize a weight [out, in] to the nearest codes; `dtype` of the scales, by default the weight's.

    Raises:
        ConfigError: the format's groups don't divide the inputs.
    """
    scale, zero = scales_of(weight, fmt, dtype or weight.dtype)
    return QuantizedWeight.pack(fmt, codes_of(weight, scale, zero, fmt), scale, zero)


def _stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale as stored: never zero, never infinite; a group of zeros has 1."""
    limit = torch.finfo(dtype).max
    return torch.where(scale > 0, scale.clamp(_SMALLEST_SCALE, limit), 1.0).to(dtype)
