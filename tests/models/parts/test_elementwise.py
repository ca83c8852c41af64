"""Elementwise functions that don't depend on the size of their input."""

from functools import partial

import pytest
import torch
from torch.nn import functional

from kvq.models.parts.elementwise import invariant_functions

GELU = partial(functional.gelu, approximate="tanh")
FUNCTIONS = [
    functional.silu,
    functional.gelu,
    GELU,
    torch.sigmoid,
    torch.tanh,
    torch.exp,
    functional.softplus,
]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("width", [1, 7, 80, 96, 1001])
def test_a_row_has_the_same_bits_in_any_number_of_rows_and_threads(function, width, threads):
    x = torch.randn(301, width, generator=torch.Generator().manual_seed(width)) * 4
    rows = [0, 1, 150, 300]
    with invariant_functions():
        alone = torch.cat([function(x[i : i + 1]) for i in rows])
        whole = function(x)
        for count in (1, 3, 5, 7):
            threads(count)
            assert torch.equal(function(x), whole)
            assert torch.equal(whole[rows], alone)
            assert torch.equal(function(x[:, None])[rows, 0], alone)
            assert torch.equal(function(torch.cat([x, x], 1)[:, :width])[rows], alone), "of a view"


def test_results_are_those_of_torch_but_for_rounding():
    x = torch.randn(5, 33)
    cases = [
        (functional.gelu, (), {"approximate": "tanh"}),
        (torch.pow, (3.0,), {}),
        (torch.Tensor.pow, (2,), {}),
        (functional.softplus, (2.0,), {}),
    ]
    for function, args, given in cases:
        with invariant_functions():
            found = function(x, *args, **given)
        torch.testing.assert_close(found, function(x, *args, **given), equal_nan=True)


def test_other_calls_pass_through():
    x, y = torch.randn(5, 33).abs(), torch.randn(5, 33)
    with invariant_functions():
        assert torch.equal(torch.pow(x, y), x.pow(y)), "two tensors"
        assert torch.equal(torch.exp(torch.arange(3)), torch.arange(3).exp()), "whole numbers"
        assert torch.sigmoid(x[:0]).shape == (0, 33)
        z = x.clone()
        assert functional.silu(z, inplace=True) is z
