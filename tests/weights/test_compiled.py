"""Quantized layers inside torch.compile and torch.export: one graph, and the bits that they give without."""

import pytest
import torch
from torch import nn

from kvq.kernels.native.library import load
from kvq.weights import QuantizedLinear
from kvq.weights.install import GatedMLP
from tests.weights.test_install import MLP, quantize

pytestmark = pytest.mark.skipif(isinstance(load(), str), reason="the C++ kernels were not built")
X = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))


def layers() -> nn.Module:
    """Two layers with a bias, and a gated MLP that is one call."""
    model = quantize(nn.Sequential(nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 64), MLP(nn.SiLU())))
    assert isinstance(model[0], QuantizedLinear)
    assert isinstance(model[3], GatedMLP)
    return model.requires_grad_(False)


def test_compiled_layers_are_one_graph_with_the_same_bits() -> None:
    model = layers()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for x in (X, X[:3], X[None]):
        assert torch.equal(compiled(x), model(x))


def test_exported_layers_take_any_number_of_rows() -> None:
    model = layers()
    program = torch.export.export(model, (X,), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},))
    assert torch.equal(program.module()(X[:3]), model(X[:3]))


@pytest.mark.long
def test_inductor_gives_the_same_numbers() -> None:
    model = layers()
    torch.testing.assert_close(torch.compile(model, fullgraph=True)(X), model(X))
