"""Weights of the RMS norms of transformers' families."""

from typing import Any

import torch
from torch import Tensor

from kvq.kernels.rms_norm.reference import NormWeight, rms_norm
from kvq.weights import runs_library_code

_TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}  # max|a-b| / max|b|


@torch.no_grad()
def norm_weight(norm: Any) -> NormWeight | None:
    """Weight and epsilon of a module that is an RMS norm, tried on two rows of one sequence; or None."""
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, float):
        return None
    if not runs_library_code(norm):
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, len(weight), generator=generator) * torch.tensor([[0.01], [30.0]])
    x = x.to(weight.device, weight.dtype)
    wanted = norm(x)
    for own in (weight, 1 + weight.float()):  # Gemma stores what it adds to 1
        error = (rms_norm(x, own, eps) - wanted).float().abs().amax(-1) / wanted.float().abs().amax(-1)
        if wanted.dtype == x.dtype and bool((error <= _TOLERANCE.get(x.dtype, 0)).all()):
            return NormWeight(weight=own.detach(), eps=eps)
    return None
