"""add_norm: the sum in place and its norm, as fp64 gives them, whatever lies beside the rows."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvq.errors import ConfigError
from kvq.kernels.rms_norm.reference import NormWeight
from kvq.kernels.rms_norm.reference import add_norm as reference
from kvq.kernels.rms_norm.triton import AddNorm

STEPS = {torch.float32: 2**-22, torch.bfloat16: 2**-8, torch.float16: 2**-11}
DTYPES = list(STEPS)

add_norm: Any = None  # the implementation under test


@pytest.fixture(autouse=True, params=["reference", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test below holds for every implementation."""
    found = in_triton if request.param == "triton" else reference
    monkeypatch.setitem(globals(), "add_norm", found)


def in_triton(x: Tensor, residual: Tensor | None, norm: NormWeight | None, **options: Any) -> Tensor:
    return AddNorm(norm, **options)(x, residual)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def beside_poison(x: Tensor) -> Tensor:
    """The same rows with NaN around them, farther apart than they are long."""
    memory = torch.full((x.shape[0] + 2, x.shape[1] + 7), math.nan, dtype=x.dtype)
    memory[1:-1, 3:-4] = x
    return memory[1:-1, 3:-4]


def norm(dim: int, dtype: torch.dtype = torch.float32, *, eps: float = 1e-5) -> NormWeight:
    return NormWeight(weight=(1 + 0.1 * numbers(dim, seed=3)).to(dtype), eps=eps)


def normed(x: Tensor, own: NormWeight) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + own.eps).sqrt() * own.weight.double()


def assert_near(got: Tensor, want: Tensor, steps: float = 1.0) -> None:
    """Within so many roundings to `got`'s dtype of each element, and of fp32 ones of its row's largest."""
    slack = 4 * STEPS[torch.float32] * want.abs().amax(-1, keepdim=True)
    assert ((got.double() - want).abs() <= steps * STEPS[got.dtype] * want.abs() + slack).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 60, 513, 2560])
def test_the_residual_is_the_sum_and_the_result_its_norm(dim: int, dtype: torch.dtype) -> None:
    given, own = (3 * numbers(5, dim)).to(dtype), norm(dim)
    x, before = beside_poison(given), (20 * numbers(5, dim, seed=1)).to(dtype)
    residual = beside_poison(before)
    around = residual.untyped_storage().nbytes()
    poison = torch.tensor([], dtype=dtype).set_(residual.untyped_storage()).isnan().sum()
    got = add_norm(x, residual, own)
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert torch.equal(x, given)
    assert_near(residual, before.double() + given.double())
    assert_near(got, normed(residual.double(), own))  # of the residual as it was rounded
    assert torch.tensor([], dtype=dtype).set_(residual.untyped_storage()).isnan().sum() == poison
    assert around == residual.untyped_storage().nbytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_post_norm_and_a_factor_come_before_the_sum(dtype: torch.dtype) -> None:
    post, own = norm(60, dtype, eps=1e-3), norm(60)
    x, before = (0.1 * numbers(4, 60)).to(dtype), numbers(4, 60, seed=2).to(dtype)
    for options, y in (
        ({"post": post}, normed(x.double(), post)),
        ({"scale": 0.22}, 0.22 * x.double()),
        ({"post": post, "scale": 3.0}, 3.0 * normed(x.double(), post)),
    ):
        residual = before.clone()
        got = add_norm(x, residual, own, **options)
        assert_near(residual, before.double() + y)
        assert_near(got, normed(residual.double(), own))
        again = before.clone()
        assert add_norm(x, again, None, **options) is again  # the last sum of a layer
        assert torch.equal(again, residual)


def test_without_a_residual_the_rows_themselves_are_normed() -> None:
    x, own = numbers(3, 60).to(torch.float16), norm(60)
    kept = x.clone()
    assert_near(add_norm(x, None, own), normed(x.double(), own))
    assert torch.equal(x, kept)
    assert add_norm(x[:0], None, own).shape == (0, 60)


def test_a_residual_may_have_more_digits_than_what_is_added() -> None:
    x, residual = numbers(3, 60).bfloat16(), 1e3 * numbers(3, 60, seed=1)
    want = residual.double() + x.double()
    got = add_norm(x, residual, norm(60))
    assert got.dtype == torch.bfloat16
    assert_near(residual, want)


def test_a_row_is_the_same_among_any_others_and_keeps_its_nan() -> None:
    x, residual, own = numbers(6, 513), numbers(6, 513, seed=1), norm(513)
    x[2, 512] = math.nan
    whole = residual.clone()
    got = add_norm(x, whole, own)
    for i in range(6):
        alone = residual[i : i + 1].clone()
        result = add_norm(x[i : i + 1], alone, own)
        torch.testing.assert_close(result, got[i : i + 1], rtol=0, atol=0, equal_nan=True)
    assert got.isnan().all(1).tolist() == [False, False, True, False, False, False]
    assert whole.isnan().sum() == 1


def test_rows_of_tiny_and_of_zero_numbers_stay_finite() -> None:
    x = torch.stack([torch.zeros(60), torch.full((60,), 1e-25), torch.full((60,), 1e15)])
    got = add_norm(x, torch.zeros(3, 60), NormWeight(weight=torch.ones(60), eps=1e-6))
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got[2], torch.ones(60))


@pytest.mark.long
def test_the_widest_row() -> None:
    x, residual, own = numbers(2, 32_768), numbers(2, 32_768, seed=1), norm(32_768)
    want = x.double() + residual.double()
    got = add_norm(x, residual, own)
    assert_near(residual, want)
    assert_near(got, normed(want, own))


def test_parts_that_do_not_fit_are_refused() -> None:
    x, own = numbers(3, 60), norm(60)
    for residual, norms in (
        (None, (None, None)),
        (numbers(3, 59), (own, None)),
        (numbers(2, 60), (own, None)),
        (numbers(60, 3).T, (own, None)),
        (None, (norm(61), None)),
        (None, (own, norm(59))),
        (None, (NormWeight(weight=numbers(120)[::2], eps=0.0), None)),
    ):
        with pytest.raises(ConfigError, match="add_norm takes"):
            add_norm(x, residual, norms[0], post=norms[1])
