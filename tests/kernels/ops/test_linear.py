"""Operators for Linear layers: torch's own checks, and what becomes of weights and kernels."""

import gc

import pytest
import torch
from torch.library import opcheck

from kvq.errors import ModelError
from kvq.formats.weights import parse_weight_format
from kvq.kernels import QuantizedWeight, ops
from kvq.kernels.linear.reference import ReferenceLinear
from kvq.kernels.ops.linear import _packed
from kvq.weights import round_weight

X = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))


def weight(name: str = "int4_g32", outputs: int = 17) -> QuantizedWeight:
    dense = torch.randn(outputs, 64, generator=torch.Generator().manual_seed(outputs))
    return round_weight(dense, parse_weight_format(name))


def by_tensors(w: QuantizedWeight, backend: str = "reference") -> torch.Tensor:
    return ops.linear(X, w.codes, w.scale, w.zero, w.order, w.fmt.name, backend)


@pytest.mark.parametrize("name", ["int4_g32_asym", "int8", "fp8"])
def test_a_weight_is_multiplied_by_its_tensors(name: str) -> None:
    w = weight(name)
    assert torch.equal(by_tensors(w), ReferenceLinear(w)(X))


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_packed_weight_follows_its_codes_and_goes_with_them(backend: str) -> None:
    w, before = weight("int8"), len(_packed)
    assert torch.equal(by_tensors(w, backend), by_tensors(w, backend))
    w.codes.zero_()
    assert not by_tensors(w, backend).any(), "the old codes were multiplied"
    assert len(_packed) <= before + 1
    del w
    gc.collect()
    assert len(_packed) == before


def test_a_kernel_is_found_by_its_number_while_it_lives() -> None:
    kernel = ReferenceLinear(weight())
    number = ops.keep(kernel)
    assert number > 1 << 32, "a program saved by another process may name this kernel for its own"
    assert torch.equal(ops.packed_linear(X, number, 17), kernel(X))
    opcheck(ops.packed_linear, (X, number, 17))
    del kernel
    gc.collect()
    with pytest.raises(ModelError, match="keep the model that was compiled or exported"):
        ops.packed_linear(X, number, 17)


def test_torch_finds_no_fault_with_a_weights_tensors() -> None:
    w = weight()
    opcheck(ops.linear, (X, w.codes, w.scale, w.zero, w.order, w.fmt.name))
