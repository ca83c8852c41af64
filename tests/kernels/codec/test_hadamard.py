"""The block Hadamard rotation, against the explicit matrix and a butterfly written out."""

import numpy as np
import pytest
import torch
from torch import Tensor

from kvq.kernels.codec import hadamard_block, rotate

BLOCKS = {48: 16, 60: 4, 63: 1, 64: 64, 80: 16, 96: 32, 128: 128, 192: 64, 256: 256}


def rows(dim: int, seed: int = 0) -> Tensor:
    """Random rows, fp32 [5, 3, dim]."""
    return torch.randn(5, 3, dim, generator=torch.Generator().manual_seed(seed))


def matrix(dim: int) -> Tensor:
    """The block-diagonal Hadamard matrix of Sylvester's order, fp64 [dim, dim]."""
    block = BLOCKS[dim]
    one = [[(-1.0) ** (i & j).bit_count() for j in range(block)] for i in range(block)]
    return torch.block_diag(*[torch.tensor(one, dtype=torch.float64) / block**0.5] * (dim // block))


@pytest.mark.parametrize(("dim", "block"), BLOCKS.items())
def test_the_block_is_the_largest_power_of_two_that_divides_the_dimension(dim: int, block: int) -> None:
    assert hadamard_block(dim) == block


@pytest.mark.parametrize("dim", BLOCKS)
def test_rotation_multiplies_by_the_block_diagonal_hadamard_matrix(dim: int) -> None:
    x = rows(dim)
    torch.testing.assert_close(rotate(x).double(), x.double() @ matrix(dim), rtol=0, atol=3e-6)


@pytest.mark.parametrize("dim", BLOCKS)
def test_rotation_is_its_own_inverse(dim: int) -> None:
    torch.testing.assert_close(rotate(rotate(rows(dim))), rows(dim), rtol=0, atol=3e-6)


@pytest.mark.parametrize("dim", BLOCKS)
def test_rotation_preserves_dot_products(dim: int) -> None:
    a, b = rows(dim, 1), rows(dim, 2)
    torch.testing.assert_close((rotate(a) * rotate(b)).sum(-1), (a * b).sum(-1), rtol=0, atol=2e-5)


@pytest.mark.parametrize("dim", BLOCKS)
def test_butterflies_run_in_fp32_by_rising_stages_with_one_multiply_at_the_end(dim: int) -> None:
    x = rows(dim) * 100
    y = x.numpy().reshape(-1, dim).copy()
    block, h = BLOCKS[dim], 1
    while h < block:
        for start in range(0, dim, 2 * h):
            for i in range(start, start + h):
                low, high = y[:, i].copy(), y[:, i + h].copy()
                y[:, i], y[:, i + h] = low + high, low - high
        h *= 2
    y *= np.float32(block**-0.5)
    assert torch.equal(rotate(x), torch.from_numpy(y).reshape(x.shape))  # bit for bit


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rows_are_rotated_in_fp32(dtype: torch.dtype) -> None:
    x = rows(96).to(dtype)
    assert rotate(x).dtype == torch.float32
    assert torch.equal(rotate(x), rotate(x.float()))


def test_an_outlier_is_spread_evenly_over_its_block_and_nowhere_else() -> None:
    x = torch.zeros(96)
    x[40] = 8.0  # in the second of three blocks of 32
    y = rotate(x)
    torch.testing.assert_close(y[32:64].abs(), torch.full((32,), 8.0 / 32**0.5))
    assert not y[:32].any()
    assert not y[64:].any()


def test_rotation_reads_strides_and_leaves_its_input_alone() -> None:
    base = torch.randn(48, 7, generator=torch.Generator().manual_seed(0))
    before = base.clone()
    assert torch.equal(rotate(base.T), rotate(base.T.contiguous()))
    assert torch.equal(base, before)
