"""gated: torch's activations times the rest, rounded once, at any width and stride."""

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvq.errors import ConfigError
from kvq.kernels.gated.reference import COMPILED, Activation
from kvq.kernels.native import library
from tests.kernels.backends import NAMES
from tests.kernels.linear.kit import error, rows_of

WANTED: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: functional.silu,
    Activation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    Activation.GELU: functional.gelu,
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter

gated: Any = None  # the implementation under test
known: list[Activation] = []


@pytest.fixture(autouse=True, params=NAMES)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test below holds for every implementation."""
    name, _, variant = request.param.partition(":")
    if variant:
        chosen = next(x for x in library.variants() if x.variant == variant)
        monkeypatch.setattr(library, "load", lambda: chosen)
    monkeypatch.setitem(globals(), "gated", import_module(f"kvq.kernels.gated.{name}").gated)
    monkeypatch.setitem(globals(), "known", list(COMPILED if name == "cpu" else Activation))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [7, 60, 513, 1100])
def test_activations_are_torchs(dtype: torch.dtype, n: int) -> None:
    x = (3 * rows_of(4, 2 * n)).to(dtype)
    gates, rest = x.double().chunk(2, 1)
    wide = torch.full((6, 2 * n + 5), math.nan, dtype=dtype)
    wide[1:5, 2 : 2 * n + 2] = x
    step = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    for activation in known:
        got = gated(x, activation)
        assert got.dtype == dtype
        assert error(got, WANTED[activation](gates) * rest) < step
        assert torch.equal(gated(wide[1:5, 2 : 2 * n + 2], activation), got)
        assert error(gated(x.T.contiguous().T, activation), got.double()) < 2 * step  # elements apart
    assert gated(x[:0], Activation.SILU).shape == (0, n)


def test_gates_far_from_zero_are_open_or_closed() -> None:
    x = torch.tensor([[1e4, 1e30, -1e4, -1e30, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    for activation in known:
        got = gated(x, activation)
        assert torch.equal(got[0, [0, 1, 4]], torch.tensor([1e4, 1e30, 0.0]))
        assert got[0, 2:4].abs().max() < 1e-30
    x[0, 1] = math.nan
    assert gated(x, Activation.SILU)[0].isnan().tolist() == [False, True, False, False, False]


def test_what_has_no_halves_is_refused() -> None:
    for x in (torch.zeros(3, 5), torch.zeros(2, 3, 4)):
        with pytest.raises(ConfigError, match="must be"):
            gated(x, Activation.SILU)


def test_an_activation_without_code_is_refused() -> None:
    if Activation.GELU not in known:
        with pytest.raises(ConfigError, match="GELU has no C"):
            gated(torch.zeros(3, 4), Activation.GELU)
