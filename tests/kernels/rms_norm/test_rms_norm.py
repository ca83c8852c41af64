"""rms_norm: the reference's values at any width, and rows that don't depend on each other."""

import pytest
import torch

from kvq.errors import ConfigError
from kvq.kernels.native import library
from kvq.kernels.rms_norm.cpu import rms_norm
from kvq.kernels.rms_norm.reference import rms_norm as reference
from tests.kernels.backends import NAMES


@pytest.fixture(autouse=True, params=[name for name in NAMES if name.startswith("cpu:")])
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test below holds for every variant."""
    name: str = request.param
    chosen = next(x for x in library.variants() if x.variant == name.partition(":")[2])
    monkeypatch.setattr(library, "load", lambda: chosen)
    return name


@pytest.mark.parametrize("dim", [1, 15, 60, 512, 513, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_the_references(dim: int, dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(dim)
    x = (4 * torch.randn(71, dim, generator=source)).to(dtype)
    x[5] = 0
    weight = torch.randn(dim, generator=source)
    for own in (weight, weight.to(dtype)):
        got, want = rms_norm(x, own, 1e-6), reference(x.double().float(), own, 1e-6)
        assert got.dtype == dtype
        step = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
        torch.testing.assert_close(got.float(), want, rtol=step, atol=1e-6)
        for rows in (1, 2, 70):
            assert torch.equal(rms_norm(x[:rows], own, 1e-6), got[:rows])
    shaped = x.view(71, 1, dim).expand(71, 2, dim)
    assert torch.equal(rms_norm(shaped, weight, 1e-6)[:, 1], rms_norm(x, weight, 1e-6))
    assert rms_norm(x[:0], weight, 1e-6).shape == (0, dim)


def test_what_is_no_number_stays_none_in_its_row() -> None:
    x = torch.ones(3, 40)
    x[1, 39] = float("nan")
    assert rms_norm(x, torch.ones(40), 1e-6).isnan().all(1).tolist() == [False, True, False]


def test_shapes_that_do_not_fit_are_refused() -> None:
    for x, weight in ((torch.ones(3, 5), torch.ones(6)), (torch.ones(3, 5).double(), torch.ones(5))):
        with pytest.raises(ConfigError, match="rms_norm takes"):
            rms_norm(x, weight, 1e-6)
