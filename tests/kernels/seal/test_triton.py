"""seal in Triton's interpreter: the reference's bytes, and no others, from lengths that the device knows."""

from dataclasses import replace

import pytest
import torch

from kvq.cache import KVCache
from kvq.kernels import StagedBatch, StagedKV
from kvq.kernels.seal import reference, triton
from tests.kernels.kit import Tables, poisoned_cache, rows_like_kv

NEW, CONTEXTS = [13, 1, 1, 6], [13, 26, 24, 22]  # the third makes no block old enough


def staged(kv: str) -> tuple[KVCache, StagedKV, StagedBatch]:
    """A cache whose recent blocks hold sequences, and nothing is sealed."""
    cache = poisoned_cache(kv, [(64, 48)], block_size=5, num_blocks=24)
    tables = [Tables.scattered(CONTEXTS, 5, 24, seed=i) for i in range(3)]
    views = cache._staged_kv(0)
    for i, length in enumerate(CONTEXTS):
        k, v = rows_like_kv(length, 3, 64, i), rows_like_kv(length, 3, 48, i + 9)
        cache.write(0, k + 3, v, torch.tensor(tables[1].slots(i, 0, length)))
    sealed, recent, sinks = (x.batch(NEW, CONTEXTS) for x in tables)
    return cache, views, StagedBatch(sealed=sealed, recent=recent, sinks=sinks if views.sinks else None)


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("kv", ["int4_mean+recent=6", "int3/int4_g24+recent=4+sinks=5", "int2_mean/int8"])
def test_blocks_have_the_references_bytes(kv: str, is_captured: bool) -> None:
    (want, layer, batch), (got, own, given) = staged(kv), staged(kv)
    reference.seal(layer, batch)
    if is_captured:
        recent = given.recent
        limits = replace(recent, lens=recent.device_lens(), context_lens=(99,) * 4, is_captured=True)
        given = replace(given, recent=limits)
    triton.seal(own, given)
    for group in range(len(want.layout.groups)):
        assert torch.equal(want.pool(group), got.pool(group)), group
    assert not (want.pool(0) == 255).all()  # something was sealed
