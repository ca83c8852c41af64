"""A weight's integer codes with inputs in their own order, as every file format keeps them."""

import torch
from torch import Tensor

from kvq.errors import ConfigError
from kvq.kernels.linear.weight import QuantizedWeight


def own_order(weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """Integer codes int8 [out, in] and the group of each input, int32 [in], both in the inputs' own order."""
    q, groups = weight.integers(), weight.scale.shape[1]
    index = torch.arange(weight.in_features, device=q.device) // (weight.in_features // groups)
    if weight.order is not None:
        q = torch.empty_like(q).index_copy_(1, weight.order, q)
        index = torch.empty_like(index).index_copy_(0, weight.order, index)
    return q, index.to(torch.int32)


def whole_groups(name: str, weight: QuantizedWeight) -> Tensor:
    """The same codes where the format on disk has no order of inputs.

    Raises:
        ConfigError: a group's inputs don't lie side by side.
    """
    q, index = own_order(weight)
    if (index.diff() < 0).any():
        raise ConfigError(
            f"{name}: this file format can't hold groups of scattered inputs (act-order); "
            f"write autogptq, or quantize without act-order"
        )
    return q


def check_fp16_scales(name: str, weight: QuantizedWeight, program: str) -> None:
    """Raise ConfigError unless the scales are as GPTQ and AWQ keep them."""
    if weight.scale.dtype is not torch.float16:
        got = weight.scale.dtype
        raise ConfigError(f"{name}: {program} keeps fp16 scales, got {got}; quantize with fp16 scales")


def offset(q: Tensor, bits: int) -> Tensor:
    """int8 codes or zero points -> uint8 from 0 to 2^bits - 1."""
    return (q.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)


def signed(codes: Tensor, bits: int) -> Tensor:
    """uint8 -> int8; undoes `offset`."""
    return (codes.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)
