"""The Triton kernels on a real GPU: bytes bit-equal to the reference's, attention within twice torch's error.

    TRITON_INTERPRET=0 python -m pytest tests/gpu

Tests named `reduced` are few and small enough for compute-sanitizer.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvq.bench.kernels.measure import exact_attention, relative_error
from kvq.bench.kernels.workload import Workload, filled_cache
from kvq.cache import KVCache
from kvq.formats import Code
from kvq.kernels import AttentionOptions, PagedKV, SequenceBatch, registry
from kvq.kernels.attend.reference import attend as reference_attend
from kvq.kernels.attend.reference import rounded_queries
from kvq.layout import BlockOrder
from tests.kernels.kit import (
    KINDS,
    MEANS,
    PER_CHANNEL,
    POISON,
    Tables,
    poisoned_cache,
    rows_like_kv,
    write_sequence,
)

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from kvq.kernels.attend import gathered
from kvq.kernels.attend.triton import step
from kvq.kernels.attend.triton.attend import attend
from kvq.kernels.attend_latent.reference import attend_latent as reference_latent
from kvq.kernels.attend_latent.triton import attend_latent
from kvq.kernels.copy_blocks.triton import copy_blocks
from kvq.kernels.gather_dense.triton import gather_dense
from kvq.kernels.gpu import shapes
from kvq.kernels.merge_partials.triton import merge_partials
from kvq.kernels.write_kv.triton import write_kv

GPU = torch.device("cuda")
PLANES = ["int5", "int3", "int6_g16/int5_g8", "int3/int4_mean"]  # these fit head_dim 64 and 128
DIMS = [(64, 64), (128, 128), (48, 60), (80, 96), (192, 128), (256, 256)]
CONTEXTS = [130, 1, 63, 300, 17]
NEW = [1, 1, 9, 2, 17]  # at two query heads a KV head, tiles of decode
MANY_NEW = [70, 1, 63, 120, 17]  # and of extend
SINKS = torch.tensor([0.0, 4.0, -3.0, 9.0, 1.0, -math.inf])


def on_gpu(cache: KVCache) -> KVCache:
    """A CPU cache with all its bytes on the GPU."""
    copy = KVCache(cache.layout, num_blocks=list(cache.num_blocks), device=GPU, backend="triton")
    for group in range(len(cache.layout.groups)):
        copy.pool(group).copy_(cache.pool(group))
    return copy


def layer_on_gpu(cache: KVCache, layer: int = 0) -> PagedKV:
    """One layer of a CPU cache on the GPU."""
    return on_gpu(cache).layer(layer)


def bytes_of(kv: PagedKV) -> Tensor:
    """The pool behind a layer's views, uint8 on the CPU."""
    storage = kv.k.codes.untyped_storage()
    return torch.tensor([], dtype=torch.uint8, device=GPU).set_(storage).cpu()


def filled(
    kv: str, dims: tuple[int, int], *, block_size: int = 16, order: BlockOrder = BlockOrder.LAYER_MAJOR
) -> tuple[KVCache, Tables, int]:
    """A poisoned cache of two layers on the CPU whose second holds the sequences of CONTEXTS."""
    need = sum(-(-n // block_size) for n in CONTEXTS) + 2
    cache = poisoned_cache(
        kv, [dims, dims], kv_heads=3, q_heads=6, block_size=block_size, num_blocks=need, order=order
    )
    tables = Tables.scattered(CONTEXTS, block_size, need)
    for i, n in enumerate(CONTEXTS):
        k, v = rows_like_kv(n, 3, dims[0], i), rows_like_kv(n, 3, dims[1], i + 50)
        write_sequence(cache.layer(1), k, v, tables.blocks[i])
    return cache, tables, need


def moved(batch: SequenceBatch) -> SequenceBatch:
    """A batch whose tensors lie on the GPU."""
    return replace(batch, tables=batch.tables.to(GPU), slots=batch.slots.to(GPU))


def check_attention(
    cache: KVCache, batch: SequenceBatch, dims: tuple[int, int], dtype: torch.dtype, **options: Any
) -> None:
    """Compare with the reference in fp32; allowed is twice what torch's own attention errs in `dtype`, or in
    bf16 where that is what K or V are in."""
    tokens = sum(batch.query_lens)
    q = rows_like_kv(tokens, 6, dims[0], 77).to(dtype)
    settings = AttentionOptions(scale=dims[0] ** -0.5, **options)
    want, want_lse = reference_attend(q.float(), cache.layer(1), batch, settings)
    moved_settings = replace(settings, sinks=None if settings.sinks is None else settings.sinks.to(GPU))
    out, lse = attend(q.to(GPU), layer_on_gpu(cache, 1), moved(batch), moved_settings)
    assert out.dtype == dtype
    codes = {fmt.code for fmt in (cache.layer(1).formats.k, cache.layer(1).formats.v)}
    rounding = torch.bfloat16 if dtype is torch.float16 and Code.BF16 in codes else dtype
    allowed = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[rounding]
    assert relative_error(out.cpu(), want.double()) < allowed
    finite = torch.isfinite(want_lse)
    assert torch.equal(finite, torch.isfinite(lse.cpu()))
    assert float((lse.cpu() - want_lse)[finite].abs().max()) < allowed * 4


@pytest.mark.parametrize("dims", DIMS[:4])
@pytest.mark.parametrize("kv", KINDS)
def test_written_bytes_are_the_references(kv: str, dims: tuple[int, int]) -> None:
    caches = [poisoned_cache(kv, [dims, dims], block_size=7, num_blocks=9) for _ in range(2)]
    layer = layer_on_gpu(caches[0], 1)
    k, v = rows_like_kv(20, 3, dims[0], 1), rows_like_kv(20, 3, dims[1], 2)
    k[3], v[4], k[5] = 0.0, 1.5, k[5] * 1e-9
    k[6], v[7, 0, 3], k[8, 1, 2] = k[6] * 1e30, math.nan, math.inf
    slots = torch.randperm(63, generator=torch.Generator().manual_seed(0))[:20]
    for dtype in (torch.float32, torch.bfloat16):
        bad = write_kv(k.to(GPU, dtype), v.to(GPU, dtype), layer, slots.to(GPU))
        want = caches[1].write(1, k.to(dtype), v.to(dtype), slots)
        assert torch.equal(bad.cpu(), want)
        assert torch.equal(bytes_of(layer), caches[1].pool(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kv", ["bf16", "fp8", "int8", "int4_g64", "int4", "fp8_per_head", "int8_rot"])
@pytest.mark.parametrize(("heads", "block_size"), [(16, 64), (16, 32), (128, 64), (5, 16)])
def test_attention_over_latents(kv: str, dtype: torch.dtype, heads: int, block_size: int) -> None:
    """Decodes and prompts in one batch; the rotary part stays in bf16."""
    dims = (64, 512)
    need = sum(-(-n // block_size) for n in CONTEXTS)
    cache = poisoned_cache(
        f"bf16/{kv}", [dims, dims], kv_heads=1, q_heads=heads, block_size=block_size, num_blocks=need
    )
    tables = Tables.scattered(CONTEXTS, block_size, need)
    for i, n in enumerate(CONTEXTS):
        k, v = rows_like_kv(n, 1, dims[0], i), rows_like_kv(n, 1, dims[1], i + 50)
        cache.write(1, k, v, torch.tensor(tables.slots(i, 0, n)))
    batch, options = tables.batch(NEW, CONTEXTS), AttentionOptions(scale=sum(dims) ** -0.5)
    q = rows_like_kv(sum(NEW), heads, sum(dims), 77).to(dtype)
    want, want_lse = reference_latent(q.float(), cache.layer(1), batch, options)
    out, lse = attend_latent(q.to(GPU), layer_on_gpu(cache, 1), moved(batch), options)
    assert out.dtype == dtype
    allowed = 2e-5 if dtype is torch.float32 else 3e-2  # as the rotary part's bf16 rounds
    assert relative_error(out.cpu(), want.double()) < allowed
    assert float((lse.cpu() - want_lse).abs().max()) < allowed * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kv", [*KINDS, *PLANES, *MEANS[:3], *PER_CHANNEL, "int4_g32_rot", "int4_g16"])
@pytest.mark.parametrize(
    ("new", "block_size"),
    [(NEW, 64), (MANY_NEW, 64), (NEW, 32), (NEW, 16)],
    ids=["decode", "extend", "blocks of 32", "blocks of 16"],
)
def test_attention_of_every_format(kv: str, dtype: torch.dtype, new: list[int], block_size: int) -> None:
    dims = (64, 64) if dtype is torch.float32 else (128, 128)
    cache, tables, _ = filled(kv, dims, block_size=block_size)
    check_attention(cache, tables.batch(new, CONTEXTS), dims, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("kv", ["int4", "int8", "fp8", "k8v4", "bf16", "fp16"])
def test_extends_of_every_head_dimension(kv: str, dims: tuple[int, int], dtype: torch.dtype) -> None:
    cache, tables, _ = filled(kv, dims, block_size=64)
    check_attention(cache, tables.batch(MANY_NEW, CONTEXTS), dims, dtype)


@pytest.mark.parametrize("new", [NEW, MANY_NEW], ids=["decode", "extend"])
@pytest.mark.parametrize("block_size", [64, 16])
@pytest.mark.parametrize("dims", [(128, 128), (80, 96), (48, 60)])
@pytest.mark.parametrize(
    "kv",
    [
        *("int8", "k8v4", "fp8", "fp8_rot"),
        pytest.param(
            "int8_per_head_rot", marks=pytest.mark.xfail(reason="wrong on an H200, not yet explained")
        ),
    ],
)
def test_products_of_8_bits(kv: str, dims: tuple[int, int], block_size: int, new: list[int]) -> None:
    """Those of rounded queries; of few rows and FP8 on Hopper queries are not rounded, and err less."""
    if "fp8" in kv and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no products of FP8")
    cache, tables, _ = filled(kv, dims, block_size=block_size)
    layer, batch, settings = cache.layer(1), tables.batch(new, CONTEXTS), AttentionOptions(scale=0.1)
    q = rows_like_kv(sum(new), 6, dims[0], 77).half()
    want, _ = reference_attend(rounded_queries(q, layer.formats.k), layer, batch, settings)
    exact, _ = reference_attend(q.float(), layer, batch, settings)
    out = attend(q.to(GPU), layer_on_gpu(cache, 1), moved(batch), settings, rounded=True)[0].cpu()
    assert relative_error(out, exact.double()) < 4e-3 + 2 * relative_error(want, exact.double())
    first = slice(None) if "fp8" not in kv else slice(0, new[0] if new is MANY_NEW else 0)
    torch.testing.assert_close(out[first].float(), want[first], atol=4e-3 * float(want.abs().max()), rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv", ["int4_g64", "int8", "fp16"])
def test_large_queries_of_one_sign(kv: str, dtype: torch.dtype) -> None:
    """fp16 holds them, but not their sums, which minimums are multiplied by."""
    cache, tables, _ = filled(kv, (128, 128), block_size=64)
    q = (rows_like_kv(5, 6, 128, 77).abs() + 1e4).to(dtype)
    batch, settings = tables.batch([1] * 5, CONTEXTS), AttentionOptions(scale=1e-5)
    want, _ = reference_attend(q.float(), cache.layer(1), batch, settings)
    out, _ = attend(q.to(GPU), layer_on_gpu(cache, 1), moved(batch), settings)
    assert relative_error(out.cpu(), want.double()) < 3e-2


@pytest.mark.parametrize("kv", ["int4_g32", "int4", "int8", "fp8"])
def test_values_of_any_size(kv: str) -> None:
    """Weights are fp16 numbers: neither large scales nor small ones leave their range."""
    for size in (1e-3, 3e4):
        cache = poisoned_cache(kv, [(64, 64)], kv_heads=3, q_heads=6, block_size=64, num_blocks=3)
        tables = Tables.scattered([50], 64, 3)
        k, v = rows_like_kv(50, 3, 64, 1), rows_like_kv(50, 3, 64, 2)
        cache.write(0, k, v * (size / v.abs().max()), torch.tensor(tables.slots(0, 0, 50)))
        q, batch, settings = rows_like_kv(1, 6, 64, 3), tables.batch([1], [50]), AttentionOptions(scale=0.1)
        want, _ = reference_attend(q, cache.layer(0), batch, settings)
        out, _ = attend(q.to(GPU, torch.bfloat16), layer_on_gpu(cache), moved(batch), settings)
        assert relative_error(out.cpu(), want.double()) < 3e-2


@pytest.mark.parametrize("options", [{"window": 40}, {"softcap": 5.0, "sinks": SINKS}])
@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("kv", ["int4", "fp8", "bf16"])
def test_windows_caps_sinks_and_splits(
    kv: str, splits: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if splits:
        monkeypatch.setattr(shapes, "_LEAST_SPLIT", 64)
    cache, tables, _ = filled(kv, (64, 64))
    check_attention(cache, tables.batch(NEW, CONTEXTS), (64, 64), torch.bfloat16, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv", ["int4", "fp8", "int8", "bf16"])
def test_exact_attention_has_the_same_bits_beside_any_others(
    kv: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "_FIXED_PIECE", 64)
    cache, tables, _ = filled(kv, (64, 64))
    layer, options, known = layer_on_gpu(cache, 1), AttentionOptions(scale=0.2, exact=True), []
    for new in ([1] * 5, NEW, MANY_NEW):
        counts = zip(CONTEXTS, new, strict=True)
        q = torch.cat([rows_like_kv(n, 6, 64, i)[n - count :] for i, (n, count) in enumerate(counts)])
        out, _ = attend(q.to(GPU, dtype), layer, moved(tables.batch(new, CONTEXTS)), options)
        known.append(torch.stack([rows[-1] for rows in out.split(new)]))
    assert all(torch.equal(known[0], rows) for rows in known[1:])


@pytest.mark.parametrize("kv", ["int4", "k8v4"])
@pytest.mark.parametrize(
    ("dims", "block_size", "order"),
    [
        *((dims, 16, BlockOrder.LAYER_MAJOR) for dims in DIMS),
        *(((64, 64), size, BlockOrder.BLOCK_MAJOR) for size in (24, 64, 256)),
    ],
)
def test_head_dimensions_and_block_sizes(
    kv: str, dims: tuple[int, int], block_size: int, order: BlockOrder
) -> None:
    cache, tables, _ = filled(kv, dims, block_size=block_size, order=order)
    check_attention(cache, tables.batch(NEW, CONTEXTS), dims, torch.bfloat16)


def gather_all(monkeypatch: pytest.MonkeyPatch, chunk_bytes: int) -> None:
    """Let sequences of a few new tokens be gathered, in chunks of so many bytes."""
    monkeypatch.setattr(gathered, "LEAST_ROWS", 18)
    monkeypatch.setattr(gathered, "LEAST_PAIRS", 1)
    monkeypatch.setattr(gathered, "SCRATCH_BYTES", chunk_bytes)


@pytest.mark.parametrize("options", [{}, {"sinks": SINKS}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv", ["int4", "fp8", "int8_per_head", "fp16"])
def test_gathered_rows_attend_as_blocks_do(
    kv: str, dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gather_all(monkeypatch, 7 * 2 * 3 * 64 * 2)  # 7 keys of 3 heads
    cache, tables, _ = filled(kv, (64, 64))
    check_attention(cache, tables.batch(NEW, CONTEXTS), (64, 64), dtype, **options)


@pytest.mark.parametrize("is_gathered", [False, True])
@pytest.mark.parametrize("kv", ["int4", "int8", "fp8", "bf16"])
def test_a_long_extend_errs_no_more_than_twice_what_torch_does(
    kv: str, is_gathered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_gathered:
        gather_all(monkeypatch, 1 << 20)
    workload = Workload(
        contexts=(9000, 700),
        new=300,
        q_heads=8,
        kv_heads=2,
        head_dim=128,
        block_size=64,
        dtype=torch.bfloat16,
        device=GPU,
    )
    cache, batch, _ = filled_cache(workload, kv, "triton")
    q = workload.queries()
    out, _ = attend(q.flatten(0, 1), cache.layer(0), batch, AttentionOptions(scale=128**-0.5))
    k, v = cache.gather(0, batch.tables[:1], 0, 9000, unrotate=True)
    truth = exact_attention(q[0], k[0], v[0], 128**-0.5)
    mask = torch.ones(300, 9000, dtype=torch.bool, device=GPU).tril_(8700)
    half = [x.to(torch.bfloat16) for x in (k, v)]
    torchs = functional.scaled_dot_product_attention(
        q[:1].transpose(1, 2), *half, attn_mask=mask, scale=128**-0.5, enable_gqa=True
    )
    allowed = 2 * relative_error(torchs[0].transpose(0, 1), truth)
    assert relative_error(out[:300], truth) <= allowed


@pytest.mark.parametrize("kv", KINDS)
def test_gathered_rows_have_the_references_bits(kv: str) -> None:
    cache, tables, _ = filled(kv, (64, 48))
    table = tables.batch(NEW, CONTEXTS, unused=0).tables[3:4]
    reference = next(
        k.run for k in registry._KERNELS if (k.operation, k.backend) == ("gather_dense", "reference")
    )
    for unrotate in (False, True):
        want = reference(cache.layer(1), table, 5, 290, unrotate=unrotate)
        got = gather_dense(layer_on_gpu(cache, 1), table.to(GPU), 5, 290, unrotate=unrotate)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a.cpu(), b)


def test_blocks_are_copied_and_partials_merged() -> None:
    parts = [torch.randint(0, 256, (9, n), dtype=torch.uint8, device=GPU) for n in (4097, 48, 10_000)]
    for pairs in (
        [(3, 4), (5, 6)],
        [(0, 1), (1, 2)],
        [(1, 2), (0, 1)],
        [],
        [(2, 2)],
        [(7, 8), (3, 1), (7, 0)],
    ):
        want = [part.clone() for part in parts]
        for part in want:
            for source, target in pairs:
                part[target] = part[source]
        copy_blocks(parts, pairs)
        assert all(torch.equal(a, b) for a, b in zip(parts, want, strict=True))
    outs, lses = torch.randn(4, 5, 6, 80), torch.randn(4, 5, 6) * 5
    lses[1], outs[1] = -math.inf, math.nan
    want = registry.merge_partials(outs, lses, SINKS)
    got = merge_partials(outs.to(GPU), lses.to(GPU), SINKS.to(GPU))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv", ["int4", "fp8", "bf16"])
def test_reduced(kv: str) -> None:
    """Write, attend in both kernels, gather: what a memory checker can watch in a minute."""
    cache, tables, _ = filled(kv, (64, 64))
    moved_layer = layer_on_gpu(cache, 1)
    k, v = (rows_like_kv(3, 3, 64, i).to(GPU, torch.bfloat16) for i in (1, 2))
    write_kv(k, v, moved_layer, torch.tensor([0, 1, 2], device=GPU))
    check_attention(cache, tables.batch(NEW, CONTEXTS), (64, 64), torch.bfloat16)
    gather_dense(moved_layer, tables.batch(NEW, CONTEXTS, unused=0).tables[:1].to(GPU), 0, 130)
    assert POISON in bytes_of(moved_layer)
