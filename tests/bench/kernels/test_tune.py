"""Tuning of Linear layers: what can be checked without a GPU."""

import pytest
import torch

from benchmarks import linear_tiles
from benchmarks.linear_tiles import candidates, tune_linear
from kvq.bench.kernels.linear import LinearWorkload
from kvq.errors import KVQError
from kvq.kernels.linear import tiles
from kvq.kernels.linear.cpu import CpuLinear


@pytest.mark.parametrize("rows", [*tiles.ROW_CLASSES, tiles.MANY_ROWS])
def test_tiles_to_try_are_of_their_class_and_differ(rows: int) -> None:
    tried = candidates(rows)
    assert len(tried) == len(set(tried)) > 10
    if rows != tiles.MANY_ROWS:
        assert {x.rows for x in tried} == {rows}, "one tile is as high as the step"


def test_the_fastest_tile_of_those_that_are_right_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is a CPU's, which has no tiles: what is tested is the choice."""
    workload = LinearWorkload(
        out_features=8,
        in_features=64,
        rows=16,
        dtype=torch.float32,
        device=torch.device("cpu"),
        backend="cpu",
    )
    monkeypatch.setattr("kvq.bench.kernels.measure.cache_bytes", lambda _: 1 << 12)
    few = candidates(16)[:2]
    monkeypatch.setattr(linear_tiles, "candidates", lambda _: few)
    key, best, rows = tune_linear(workload, "int8", repeats=3)
    assert key == "linear int8 16 interpreter"
    assert best == min(zip(few, rows, strict=True), key=lambda pair: pair[1]["ms_median"])[0]
    product = CpuLinear.__call__
    monkeypatch.setattr(CpuLinear, "__call__", lambda *arguments: 1.01 * product(*arguments))
    with pytest.raises(KVQError, match="nothing was tuned"):
        tune_linear(workload, "int8")
