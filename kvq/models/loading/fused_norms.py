"""RMS norms of a model on a CPU in one call instead of torch's six."""

import torch
from torch import Tensor, nn

from kvq.kernels.native.library import load
from kvq.kernels.rms_norm.cpu import rms_norm
from kvq.models.parts.norms import norm_weight


class FusedRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight; what a family adds to its weight is in it."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., dim] -> the same."""
        return rms_norm(hidden_states, self.weight, self.eps)


@torch.no_grad()
def fuse_norms(model: nn.Module) -> None:
    """Replace a model's RMS norms, each after it was tried on two rows; others stay what they are."""
    if isinstance(load(), str):
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm") and (found := norm_weight(child)) is not None:
                setattr(parent, name, FusedRMSNorm(found.weight.clone(), found.eps))
