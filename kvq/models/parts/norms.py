"""RMS norms of transformers' model families: their weights and, on CPUs, one call in place of torch's six."""

from typing import Any

import torch
from torch import Tensor, nn

from kvq.kernels.native.library import load
from kvq.kernels.rms_norm import cpu, reference
from kvq.kernels.rms_norm.reference import NormWeight
from kvq.weights import runs_library_code

_TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}  # max|a-b| / max|b|


@torch.no_grad()
def norm_weight(norm: Any) -> NormWeight | None:
    """Return a module's weight and epsilon if a trial on two rows proves it to be an RMS norm, else None."""
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, float):
        return None
    if not runs_library_code(norm):
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, len(weight), generator=generator, dtype=torch.float32)
    x = (x * torch.tensor([[0.01], [30.0]], dtype=torch.float32)).to(weight.device, weight.dtype)
    wanted = norm(x)
    for own in (weight, 1 + weight.float()):  # Gemma stores weight - 1
        off = (reference.rms_norm(x, own, eps) - wanted).float()
        error = off.abs().amax(-1) / wanted.float().abs().amax(-1)
        if wanted.dtype == x.dtype and bool((error <= _TOLERANCE.get(x.dtype, 0)).all()):
            return NormWeight(weight=own.detach(), eps=eps)
    return None


class FusedRMSNorm(nn.Module):
    """RMS norm, x / sqrt(mean(x^2) + eps) * weight; `weight` includes any offset, such as Gemma's 1."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        return cpu.rms_norm(hidden_states, self.weight, self.eps)


@torch.no_grad()
def fuse_norms(model: nn.Module) -> None:
    """Replace a model's RMS norms, each after a trial on two rows; other modules stay unchanged."""
    if isinstance(load(), str):
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm") and (found := norm_weight(child)) is not None:
                setattr(parent, name, FusedRMSNorm(found.weight.clone(), found.eps))
