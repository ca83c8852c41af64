"""The quicker interpreter still finds what Triton's own finds."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError


@triton.jit
def _total(x):
    return tl.sum(x, 0)


@triton.jit
def _multiply(numbers, factor: tl.constexpr):
    at = numbers + tl.arange(0, 16)
    products = tl.load(at) * factor
    tl.store(at, products + _total(products))


def test_functions_are_called_and_overflows_are_errors() -> None:
    numbers = torch.arange(16, dtype=torch.int32)
    for _ in range(2):  # what a launch patches is there for the next one, too
        found = numbers.clone()
        _multiply[(1,)](found, 3)
        assert torch.equal(found, 3 * numbers + 360)
    with pytest.raises(InterpreterError, match="int32 overflow detected for operation mul"):
        _multiply[(1,)](numbers.clone(), 1 << 30)
