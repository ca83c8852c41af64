"""Sealing and attention to sealed, recent and first tokens on a real GPU, beside the reference.

TRITON_INTERPRET=0 python -m pytest tests/gpu
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvq.bench.kernels.measure import relative_error
from kvq.cache import KVCache
from kvq.kernels import AttentionOptions, StagedBatch
from kvq.kernels.attend.options import Part
from kvq.kernels.attend.reference import attend as reference_attend
from kvq.kernels.gather_dense.reference import gather_dense as reference_gather
from kvq.kernels.seal import reference
from tests.kernels.kit import MEANS, PER_CHANNEL, Tables, poisoned_cache, rows_like_kv

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from kvq.kernels.attend.triton.attend import attend
from kvq.kernels.gather_dense.triton import gather_dense
from kvq.kernels.seal.triton import seal
from tests.gpu.test_kernels import GPU, moved, on_gpu

NEW = [150, 1, 1, 70]


def staged(kv: str, size: int) -> tuple[KVCache, StagedBatch, StagedBatch]:
    """A cache on the CPU whose recent blocks hold sequences, and nothing is sealed: with the step that adds
    all of them, and with one that adds NEW."""
    contexts = [150, 5 * size + 1, 2 * size, 200]
    count = 2 * sum(-(-n // size) for n in contexts)
    cache = poisoned_cache(kv, [(128, 64)], q_heads=6, block_size=size, num_blocks=count)
    tables = [Tables.scattered(contexts, size, count, seed=i) for i in range(3)]
    views = cache.stores[0].kv
    for i, length in enumerate(contexts):
        k, v = rows_like_kv(length, 3, 128, i), rows_like_kv(length, 3, 64, i + 9)
        cache.write(0, k + 3, v - 2, torch.tensor(tables[1].slots(i, 0, length)))
    steps = []
    for new in (contexts, NEW):
        sealed, recent, sinks = (x.batch(new, contexts) for x in tables)
        steps.append(StagedBatch(sealed=sealed, recent=recent, sinks=sinks if views.sinks else None))
    return cache, steps[0], steps[1]


def staged_on_gpu(batch: StagedBatch) -> StagedBatch:
    """A batch whose tensors lie on the GPU."""
    parts: dict[str, Any] = {"sealed": batch.sealed, "recent": batch.recent, "sinks": batch.sinks}
    return StagedBatch(**{name: part and moved(part) for name, part in parts.items()})


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize(
    "kv",
    [*MEANS[:3], *PER_CHANNEL, "int4_mean+recent=40", "int3/int4_g32+recent=4+sinks=5", "int2_mean+sinks=4"],
)
def test_sealed_blocks_have_the_references_bytes(kv: str, size: int, is_captured: bool) -> None:
    cache, _, batch = staged(kv, size)
    copy, given = on_gpu(cache), staged_on_gpu(batch)
    if is_captured:
        recent = given.recent
        lens = recent.device_lens()
        given = replace(given, recent=replace(recent, lens=lens, context_lens=(999,) * 4, is_captured=True))
    before = cache.pool(0).clone()
    reference.seal(cache.stores[0].kv, batch)
    seal(copy.stores[0].kv, given)
    for group in range(len(cache.layout.groups)):
        assert torch.equal(copy.pool(group).cpu(), cache.pool(group)), group
    assert not torch.equal(before, cache.pool(0))  # something was sealed


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("kv", [*MEANS[:3], *PER_CHANNEL, "int4_mean", "int2_mean+sinks=4"])
def test_every_part_of_a_staged_layer_is_attended_to(kv: str, size: int) -> None:
    """Through the cache, which merges them, for prompts and for single tokens; sealed blocks are gathered."""
    cache, whole, batch = staged(kv, size)
    reference.seal(cache.stores[0].kv, whole)
    copy, given = on_gpu(cache), staged_on_gpu(batch)
    options = AttentionOptions(scale=128**-0.5, softcap=30.0)
    q = rows_like_kv(sum(NEW), 6, 128, 5).bfloat16()
    want, want_lse = cache.attend(0, q.float(), batch, options)
    out, lse = copy.attend(0, q.to(GPU), given, options)
    assert relative_error(out.cpu(), want.double()) < 3e-2
    assert float((lse.cpu() - want_lse).abs().max()) < 0.1
    exact = cache.stores[0].kv.exact
    part = Part(is_young=False, recent=exact.recent, block_size=size, first=exact.sinks)
    old = replace(options, part=part)
    want, _ = reference_attend(q.float(), cache.layer(0), batch.sealed, old)
    out, _ = attend(q.to(GPU), copy.layer(0), given.sealed, old)
    assert relative_error(out.cpu(), want.double()) < 3e-2
    at = batch.sealed.tables[1:2], exact.sinks, 4 * size
    rows = gather_dense(copy.layer(0), at[0].to(GPU), *at[1:], unrotate=True)
    for got, expected in zip(rows, reference_gather(cache.layer(0), *at, unrotate=True), strict=True):
        assert torch.equal(got.cpu(), expected)
