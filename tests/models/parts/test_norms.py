"""RMS norms on CPUs: one call where it computes what the model's own does, and the model's own elsewhere."""

import pytest
import torch
from torch import nn

from kvq.kernels.native.library import load
from kvq.models.parts.norms import FusedRMSNorm, fuse_norms
from tests.helpers_models import build_model, small_config

pytestmark = pytest.mark.skipif(isinstance(load(), str), reason="the C++ kernels were not built")


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "olmo2", "phi3"])
@torch.inference_mode()
def test_families_keep_their_results(family: str) -> None:
    model = build_model(small_config(family))
    ids = torch.tensor([[5, 9, 100, 17, 3]])
    wanted = model(ids).logits
    fuse_norms(model)
    assert any(isinstance(module, FusedRMSNorm) for module in model.modules())
    assert not any(
        type(m).__name__.endswith("RMSNorm") and not isinstance(m, FusedRMSNorm) for m in model.modules()
    )
    torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-4, atol=1e-5)


class CubicRMSNorm(nn.Module):
    """Named like one of them and something else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x**3 * self.weight


def test_a_norm_that_computes_something_else_is_left_alone() -> None:
    model = nn.Sequential(CubicRMSNorm(), nn.LayerNorm(8))
    fuse_norms(model)
    assert [type(module) for module in model] == [CubicRMSNorm, nn.LayerNorm]
