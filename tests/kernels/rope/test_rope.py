"""rope: the reference's values for heads of any size, in place, and rows that don't depend on each other."""

import pytest
import torch

from kvq.errors import ConfigError
from kvq.kernels.native import library
from kvq.kernels.rope.cpu import rope
from kvq.kernels.rope.reference import rope as reference
from tests.kernels.backends import NAMES


@pytest.fixture(autouse=True, params=[name for name in NAMES if name.startswith("cpu:")])
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test below holds for every variant."""
    name: str = request.param
    chosen = next(x for x in library.variants() if x.variant == name.partition(":")[2])
    monkeypatch.setattr(library, "load", lambda: chosen)
    return name


@pytest.mark.parametrize("dim", [2, 24, 60, 64, 128, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_the_references_and_neighbours_are_left_alone(dim: int, dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(dim)
    rows, heads = 35, 3
    memory = torch.full((rows, heads * dim + 5), 7.0).to(dtype)
    x = memory[:, 2 : 2 + heads * dim].view(rows, heads, dim)
    x.copy_(4 * torch.randn(rows, heads, dim, generator=source))
    angles = torch.randn(rows, dim, generator=source)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    want, given = x.float().clone(), x.clone()
    reference(want, cos.float(), sin.float())
    rope(x, cos, sin)
    step = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(x.float(), want, rtol=step, atol=16 * step)
    assert (memory[:, :2] == 7).all()
    assert (memory[:, 2 + heads * dim :] == 7).all()
    for row in (0, 34):
        alone = given[row : row + 1].clone()
        rope(alone, cos[row : row + 1], sin[row : row + 1])
        assert torch.equal(alone, x[row : row + 1])


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, angles = torch.ones(3, 2, 8), torch.ones(3, 8)
    for y, cos in (
        (x[..., :7], angles[:, :7]),
        (x, angles[:, :4]),
        (x.transpose(1, 2), angles),
        (x.double(), angles),
    ):
        with pytest.raises(ConfigError, match="rope takes"):
            rope(y, cos, cos)
