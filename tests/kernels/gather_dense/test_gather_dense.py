"""gather_dense: any range of positions of a scattered sequence, and nothing from outside it."""

from typing import Any

import pytest
import torch

from kvq.kernels.gather_dense import reference
from kvq.kernels.write_kv.reference import write_kv
from kvq.layout import BlockOrder
from tests.kernels.backends import every_backend
from tests.kernels.kit import (
    CHANNELS,
    KINDS,
    MEANS,
    Tables,
    poisoned_cache,
    rows_like_kv,
    stored,
    write_sequence,
)

gather_dense: Any = None  # the implementation under test


backend = every_backend("gather_dense", globals())


RANGES = [(0, 23), (0, 1), (22, 23), (4, 5), (5, 10), (4, 11), (0, 20), (19, 23), (7, 7), (0, 0)]


@pytest.mark.daily(60)
@pytest.mark.parametrize("order", list(BlockOrder))
@pytest.mark.parametrize("kv", [*KINDS, *MEANS, *CHANNELS])
def test_every_range_of_positions_is_those_rows(kv: str, order: BlockOrder) -> None:
    cache = poisoned_cache(kv, [(64, 48), (48, 64)], order=order)
    tables = Tables.scattered([23, 9], 5, 11)
    k, v = rows_like_kv(23, 3, 48), rows_like_kv(23, 3, 64)
    write_sequence(cache.layer(1), k, v, tables.blocks[0])
    table = torch.tensor([*tables.blocks[0], -1, 1 << 30], dtype=torch.int32)  # unused entries behind the end
    whole_k = stored(cache, 1, "k", k).transpose(0, 1)
    whole_v = stored(cache, 1, "v", v).transpose(0, 1)
    for start, end in RANGES:
        got_k, got_v = (x[0] for x in gather_dense(cache.layer(1), table[None], start, end))
        assert got_k.dtype == got_v.dtype == torch.float32
        assert torch.equal(got_k, whole_k[:, start:end]), (start, end)
        assert torch.equal(got_v, whole_v[:, start:end]), (start, end)
        turned = gather_dense(cache.layer(1), table[None], start, end, unrotate=True)
        want = reference.gather_dense(cache.layer(1), table[None], start, end, unrotate=True)
        assert all(torch.equal(a, b) for a, b in zip(turned, want, strict=True))


@pytest.mark.parametrize("kv", KINDS)
def test_slots_outside_the_range_are_not_read_whatever_they_hold(kv: str) -> None:
    cache = poisoned_cache(kv, [(60, 48)])  # every slot but the written ones decodes to NaN
    k, v = rows_like_kv(3, 3, 60), rows_like_kv(3, 3, 48)
    table = torch.tensor([9, 4], dtype=torch.int32)
    write_kv(k, v, cache.layer(0), torch.tensor([9 * 5 + 3, 9 * 5 + 4, 4 * 5]))  # positions 3, 4, 5
    for rows in gather_dense(cache.layer(0), table[None], 3, 6):
        assert rows.shape[:3] == (1, 3, 3)
        assert torch.isfinite(rows).all()
