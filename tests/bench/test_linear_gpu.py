"""Measuring Linear layers: what can be checked without a GPU."""

import pytest

from kvq.bench.linear_gpu import candidates
from kvq.kernels.linear import tiles


@pytest.mark.parametrize("rows", [*tiles.ROW_CLASSES, tiles.MANY_ROWS])
def test_tiles_to_try_are_of_their_class_and_differ(rows: int) -> None:
    tried = candidates(rows)
    assert len(tried) == len(set(tried)) > 10
    if rows != tiles.MANY_ROWS:
        assert {x.rows for x in tried} == {rows}, "one tile is as high as the step"
