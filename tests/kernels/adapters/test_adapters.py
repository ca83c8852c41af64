"""adapters: each row gets its own adapter's update, at any shape, and nothing else is read or written."""

import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from kvq.errors import ConfigError
from kvq.kernels.adapters.cpu import CpuFactors
from kvq.kernels.adapters.reference import Factors
from kvq.kernels.native import library
from tests.kernels.backends import NAMES

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STEP = {torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # of the largest result
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter

run: Any = None  # the implementation under test


@pytest.fixture(autouse=True, params=NAMES)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test below holds for every implementation."""
    name, _, variant = request.param.partition(":")
    if variant:
        chosen = next(x for x in library.variants() if x.variant == variant)
        monkeypatch.setattr(library, "load", lambda: chosen)
    module = import_module(f"kvq.kernels.adapters.{name}")

    def call(out: Tensor, x: Tensor, factors: Sequence[Factors | None], chosen: Tensor) -> None:
        known: Any = factors
        if name == "cpu":
            known = [one and CpuFactors(one) for one in factors]
        elif name == "triton":
            known = module.StackedFactors(factors)
        module.adapters(out, x, known, chosen)

    monkeypatch.setitem(globals(), "run", call)
    return name


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def factors_of(rank: int, inputs: int, outputs: int, dtype: torch.dtype, seed: int = 0) -> Factors:
    a, b = numbers(rank, inputs, seed=seed) / math.sqrt(inputs), numbers(outputs, rank, seed=seed + 1)
    return Factors(a=a.to(dtype), b=b.to(dtype), scale=0.7)


def wanted(out: Tensor, x: Tensor, factors: Sequence[Factors | None], chosen: Tensor) -> Tensor:
    """Row by row in fp64."""
    found = out.double()
    for row, i in enumerate(chosen.tolist()):
        own = None if i < 0 else factors[i]
        if own is not None:
            found[row] += own.scale * own.b.double() @ (own.a.double() @ x[row].double())
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(60, 77), (5, 130), (256, 16)])
def test_every_row_gets_the_update_that_it_chose(
    inputs: int, outputs: int, stored: torch.dtype, dtype: torch.dtype
) -> None:
    factors = [factors_of(r, inputs, outputs, stored, seed=r) if r else None for r in (3, 0, 16, 1)]
    for rows in (1, 7, 21):
        x, out = numbers(rows, inputs, seed=rows).to(dtype), numbers(rows, outputs, seed=rows + 1).to(dtype)
        chosen = torch.randint(-1, 4, (rows,), generator=torch.Generator().manual_seed(rows)).int()
        before, right = out.clone(), wanted(out, x, factors, chosen)
        run(out, x, factors, chosen)
        assert (out.double() - right).abs().max() <= STEP[dtype] * right.abs().max()
        plain = torch.tensor([i < 0 or factors[i] is None for i in chosen.tolist()])
        assert torch.equal(out[plain], before[plain])


def test_a_rows_bits_do_not_depend_on_the_others(backend: str) -> None:
    if backend == "reference":
        pytest.skip("torch sums many rows in another order")
    factors = [factors_of(12, 60, 77, torch.bfloat16, seed=i) for i in range(3)]
    x, chosen = numbers(203, 60), torch.arange(203).div(9, rounding_mode="floor").remainder(4).int() - 1
    out = torch.zeros(203, 77)
    run(out, x, factors, chosen)
    for rows in (slice(0, 1), slice(9, 12), slice(100, 203), slice(7, 150, 11)):
        some = torch.zeros(len(x[rows]), 77)
        run(some, x[rows].contiguous(), factors, chosen[rows].contiguous())
        assert torch.equal(some, out[rows])


def test_numbers_beside_the_rows_are_neither_read_nor_written(backend: str) -> None:
    if backend == "triton":
        pytest.skip("takes rows side by side")
    factors, chosen = [factors_of(5, 61, 33, torch.float32)], torch.tensor([0, -1, 0], dtype=torch.int32)
    x, out = torch.full((5, 70), math.nan), torch.full((5, 40), math.nan)
    x[1:4, 4:65], out[1:4, 3:36] = numbers(3, 61), 0
    right = wanted(torch.zeros(3, 33), x[1:4, 4:65], factors, chosen)
    run(out[1:4, 3:36], x[1:4, 4:65], factors, chosen)
    assert torch.allclose(out[1:4, 3:36].double(), right, atol=1e-5)
    out[1:4, 3:36] = math.nan
    assert out.isnan().all()


def test_rows_that_do_not_fit_are_refused(backend: str) -> None:
    factors, chosen = [factors_of(5, 60, 33, torch.float32)], torch.zeros(3, dtype=torch.int32)
    x, out = numbers(3, 60), torch.zeros(3, 33)
    for wrong in (
        (out, x.bfloat16(), chosen), (out[:2], x, chosen), (out, x, chosen.long()), (out, x, chosen[:2]),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="adapters take rows"):
            run(wrong[0], wrong[1], factors, wrong[2])
    if backend == "cpu":
        for wrong in (
            (out[:, :32], x, chosen),
            (out, x[:, :59], chosen),
            (out, x, chosen + 1),
            (out, x, chosen - 2),
        ):
            with pytest.raises(ConfigError, match="don't fit"):
                run(wrong[0], wrong[1], factors, wrong[2])
    assert not out.any()
