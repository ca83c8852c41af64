"""The definition of correct for `rms_norm`."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight in fp32, rounded once: [rows, dim] -> the same, of x's dtype.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, section 4.
    """
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
