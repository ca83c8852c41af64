"""Routers beside packed experts: a row's scores are the same bits whoever else is in the step."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kvq.kernels.native.library import load
from kvq.weights.experts import PackedExperts
from kvq.weights.routers import batch_invariant_routers, is_batch_invariant

pytestmark = pytest.mark.skipif(isinstance(load(), str), reason="the C++ kernels were not built")


class _Router(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, 24))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x.type(torch.float32), self.weight.type(torch.float32)).sigmoid()


class _Experts(PackedExperts):
    def __init__(self) -> None:
        nn.Module.__init__(self)


@pytest.mark.parametrize("experts", [1, 3, 8, 64])
@torch.inference_mode()
def test_gates_of_shared_experts_are_too(experts: int) -> None:
    block, other = nn.Module(), nn.Linear(24, 3)
    block.shared_expert_gate = nn.Linear(24, experts, bias=experts % 2 == 0)
    block.experts, block.proj = _Experts(), other
    plain = torch.randn(31, 24)
    want = block.shared_expert_gate(plain).sigmoid()
    batch_invariant_routers(block)
    assert is_batch_invariant(block.shared_expert_gate)
    assert not is_batch_invariant(other)
    together = block.shared_expert_gate(plain).sigmoid()
    assert torch.allclose(together, want, atol=1e-6)
    for i in range(31):
        assert torch.equal(block.shared_expert_gate(plain[i : i + 1]).sigmoid()[0], together[i]), i


@pytest.mark.parametrize("experts", [2, 4, 8, 20, 64, 160])
@torch.inference_mode()
def test_scores_of_a_row_are_those_of_it_alone(experts: int) -> None:
    block = nn.Module()
    block.router, block.experts = _Router(experts), _Experts()
    plain = torch.randn(2, 31, 24)
    want = block.router(plain)
    batch_invariant_routers(block)
    together = block.router(plain)
    assert together.shape == want.shape
    assert torch.allclose(together, want, atol=1e-6)
    for i in range(31):
        assert torch.equal(block.router(plain[1:, i : i + 1])[0, 0], together[1, i]), i
