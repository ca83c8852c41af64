"""seal in Triton's interpreter: the reference's bytes, and no others, from lengths that the device knows."""

from dataclasses import replace

import pytest
import torch

from kvq.cache import KVCache
from kvq.kernels import AttentionOptions, StagedBatch, StagedKV
from kvq.kernels.attend.options import Part
from kvq.kernels.attend.reference import attend as attend_reference
from kvq.kernels.attend.triton.attend import attend
from kvq.kernels.gather_dense.reference import gather_dense as gather_reference
from kvq.kernels.gather_dense.triton import gather_dense
from kvq.kernels.seal import reference, triton
from tests.kernels.kit import Tables, poisoned_cache, rows_like_kv

NEW, CONTEXTS = [13, 1, 1, 6], [13, 26, 24, 22]  # the third makes no block old enough


def staged(kv: str, size: int = 5) -> tuple[KVCache, StagedKV, StagedBatch]:
    """A cache whose recent blocks of `size` tokens hold sequences, and nothing is sealed."""
    cache = poisoned_cache(kv, [(64, 48)], block_size=size, num_blocks=24)
    tables = [Tables.scattered(CONTEXTS, size, 24, seed=i) for i in range(3)]
    views = cache.stores[0].kv
    for i, length in enumerate(CONTEXTS):
        k, v = rows_like_kv(length, 3, 64, i), rows_like_kv(length, 3, 48, i + 9)
        cache.write(0, k + 3, v, torch.tensor(tables[1].slots(i, 0, length)))
    sealed, recent, sinks = (x.batch(NEW, CONTEXTS) for x in tables)
    return cache, views, StagedBatch(sealed=sealed, recent=recent, sinks=sinks if views.sinks else None)


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize(
    ("kv", "size"),
    [
        *(("int4_mean+recent=6", 5), ("int3/int4_g24+recent=4+sinks=5", 5), ("int2_mean/int8", 5)),
        *(("int4_per_channel/int4+recent=3", 19), ("int8_per_channel/int8+recent=1", 17)),  # in two pieces
    ],
)
def test_blocks_have_the_references_bytes(kv: str, size: int, is_captured: bool) -> None:
    (want, layer, batch), (got, own, given) = staged(kv, size), staged(kv, size)
    reference.seal(layer, batch)
    if is_captured:
        recent = given.recent
        limits = replace(recent, lens=recent.device_lens(), context_lens=(99,) * 4, is_captured=True)
        given = replace(given, recent=limits)
    triton.seal(own, given)
    for group in range(len(want.layout.groups)):
        assert torch.equal(want.pool(group), got.pool(group)), group
    assert not (want.pool(0) == 255).all()  # something was sealed


@pytest.mark.parametrize("block_size", [5, 32])
@pytest.mark.parametrize("kv", ["int4_mean", "int2_mean/int8", "int4_per_channel/int4"])
def test_sealed_blocks_are_gathered_and_attended_to_with_what_they_have_once(
    kv: str, block_size: int
) -> None:
    contexts = [3 * block_size + 9, block_size]
    cache = poisoned_cache(kv, [(64, 48)], q_heads=6, block_size=block_size, num_blocks=14)
    tables, layer = Tables.scattered(contexts, block_size, 14), cache.layer(0)
    views = cache.stores[0].kv
    for i, length in enumerate(contexts):
        k, v = rows_like_kv(length, 3, 64, i), rows_like_kv(length, 3, 48, i + 9)
        cache.write(0, k + 3, v - 2, torch.tensor(tables.slots(i, 0, length)))
    whole = tables.batch(contexts, contexts)
    reference.seal(views, StagedBatch(sealed=whole, recent=whole, sinks=None))
    for unrotate in (False, True):
        at = whole.tables[:1], 3, 2 * block_size
        wanted = gather_reference(layer, *at, unrotate=unrotate)
        for want, got in zip(wanted, gather_dense(layer, *at, unrotate=unrotate), strict=True):
            assert torch.equal(want, got)
    q, batch = rows_like_kv(21, 6, 64, 5), tables.batch([20, 1], contexts)
    part = Part(is_young=False, recent=views.exact.recent, block_size=block_size)
    options = AttentionOptions(scale=0.1, part=part, softcap=30.0)
    out, lse = attend(q, layer, batch, options)
    want_out, want_lse = attend_reference(q, layer, batch, options)
    torch.testing.assert_close(out, want_out, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
