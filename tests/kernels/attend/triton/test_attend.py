"""attend in Triton's interpreter: what its host code decides, beyond the suite of all backends."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, Literal

import pytest
import torch
import triton.language as tl
from torch import Tensor

from kvq.cache import KVCache
from kvq.errors import ConfigError
from kvq.kernels import AttentionOptions, SequenceBatch
from kvq.kernels.attend.reference import attend as reference
from kvq.kernels.attend.triton import attend as kernel
from kvq.kernels.gpu import shapes
from kvq.kernels.gpu.launch import Rows
from kvq.kernels.gpu.rows import PACKED
from kvq.layout import BlockOrder
from tests.kernels.kit import Tables, poisoned_cache, poisoned_memory, rows_like_kv, write_sequence

SINKS = torch.tensor([0.0, 4.0, -3.0, 9.0, 1.0, -math.inf])


def filled(
    kv: str,
    dims: tuple[int, int],
    contexts: list[int],
    *,
    block_size: int = 16,
    order: BlockOrder = BlockOrder.LAYER_MAJOR,
    kv_heads: int = 3,
) -> tuple[KVCache, Tables]:
    """A poisoned cache of two layers; the second holds sequences of those lengths."""
    need = sum(-(-n // block_size) for n in contexts) + 2
    cache = poisoned_cache(
        kv,
        [dims, dims],
        kv_heads=kv_heads,
        q_heads=6,
        block_size=block_size,
        num_blocks=need,
        order=order,
    )
    tables = Tables.scattered(contexts, block_size, need)
    for i, n in enumerate(contexts):
        k, v = rows_like_kv(n, kv_heads, dims[0], i), rows_like_kv(n, kv_heads, dims[1], i + 50)
        cache.write(1, k, v, torch.tensor(tables.slots(i, 0, n)))
    return cache, tables


def _rows(part: Literal["k", "v"], q: Tensor, cache: KVCache) -> Rows:
    """What the kernel to decode with is told of K or V."""
    layer = cache.layer(1)
    return kernel._read_rows(part, q, layer, shapes.shape_of("decode", layer, q), apart=False)


def compare(q: Tensor, cache: KVCache, batch: SequenceBatch, allowed: float = 5e-6, **options: Any) -> None:
    """Both kernels on one batch: outputs relative to the largest, log-sum-exps absolutely.

    As in a captured graph, this one's host knows only an upper limit of the contexts.
    """
    limits = replace(
        batch, context_lens=(4096,) * len(batch.context_lens), lens=batch.device_lens(), is_captured=True
    )
    settings = AttentionOptions(**{"scale": q.shape[2] ** -0.5, **options})
    want, want_lse = reference(q.float(), cache.layer(1), batch, settings)
    out, lse = kernel.attend(q, cache.layer(1), limits, settings)
    assert float((out - want).abs().max() / want.abs().max()) < allowed
    torch.testing.assert_close(lse, want_lse, rtol=max(allowed, 1e-5), atol=max(allowed, 1e-5))


@pytest.mark.parametrize("options", [{}, {"window": 70}, {"window": 9, "sinks": SINKS}, {"chunk": 72}])
@pytest.mark.parametrize("kv", ["int4", "bf16", "k8v4"])
def test_keys_split_over_programs_merge_to_the_same(
    kv: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shapes, "_LEAST_SPLIT", 32)
    cache, tables = filled(kv, (64, 48), [130, 1, 33, 96])
    poisoned_memory(monkeypatch)
    q = rows_like_kv(6, 6, 64, 9)
    compare(q, cache, tables.batch([2, 1, 2, 1], [130, 1, 33, 96]), **options)


@pytest.mark.parametrize("options", [{"sinks": SINKS}, {"window": 60, "softcap": 3.0}, {"chunk": 13}])
def test_a_batch_of_decodes_drafts_and_chunks(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of both heights split their keys; a sequence adds nothing."""
    monkeypatch.setattr(shapes, "_LEAST_SPLIT", 16)
    new, contexts = [1, 0, 12, 4, 1], [70, 20, 90, 33, 40]
    cache, tables = filled("int4_g32_rot", (64, 64), contexts, kv_heads=1)
    poisoned_memory(monkeypatch)
    batch = tables.batch(new, contexts)
    compare(rows_like_kv(sum(new), 6, 64, 9), cache, batch, **options)


@pytest.mark.parametrize("order", list(BlockOrder))
@pytest.mark.parametrize(
    ("kv", "dims", "block_size"),
    [
        ("int4", (192, 128), 16),
        ("int4", (256, 256), 24),
        ("int4_g32_rot", (256, 192), 64),
        ("int4_g8", (64, 96), 256),
        ("fp8_rot", (96, 80), 128),
        ("int8/fp8", (80, 192), 48),
        ("fp8_per_head/int4", (60, 60), 17),
    ],
)
def test_head_dimensions_groups_and_block_sizes(
    kv: str, dims: tuple[int, int], block_size: int, order: BlockOrder
) -> None:
    """Blocks of the second layer begin behind the first's in block-major order: strides, not shapes."""
    cache, tables = filled(kv, dims, [41, 7], block_size=block_size, order=order)
    compare(rows_like_kv(10, 6, dims[0], 9), cache, tables.batch([3, 7], [41, 7]))


@pytest.mark.parametrize(
    ("kv", "options"), [("int8/fp8", {"window": 10}), ("fp8/int4_g16", {}), ("int4_g64", {"window": 10})]
)
def test_tiles_of_fewer_keys_than_threads_read_their_scales_at_once(
    kv: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words hold two tokens: neither one behind the end nor one before the window counts."""
    monkeypatch.setattr(kernel, "_spread", lambda shape: 4)
    cache, tables = filled(kv, (64, 64), [33])
    q, batch = rows_like_kv(1, 6, 64, 9), tables.batch([1], [33])
    compare(q, cache, batch, **options)
    settings = AttentionOptions(scale=0.125, **options)
    before, _ = kernel.attend(q, cache.layer(1), batch, settings)
    if "window" in options:
        block, slot = divmod(tables.slots(0, 22, 23)[0], 16)
        cache.layer(1).v.scales[block, :, slot] = math.nan
    after, _ = kernel.attend(q, cache.layer(1), batch, settings)
    assert torch.equal(before, after)


@pytest.mark.daily(6)
@pytest.mark.parametrize("compute", [None, tl.float16])
@pytest.mark.parametrize(
    ("kv", "dims"),
    [
        ("int3", (128, 64)),  # two and two places of the second plane in a run
        ("int3_g32_rot", (256, 128)),
        ("int5", (64, 128)),  # four, and two
        ("int5_g64/int5_g64_s8_rot", (128, 128)),
        ("int5_g16", (32, 256)),
        ("int6", (128, 64)),
        ("int6_g64_rot/int3_g64_s8", (256, 128)),
        ("int6_g24", (96, 96)),  # rows and runs that are no power of two
        ("int5_g24/int3_g24", (96, 96)),
    ],
)
def test_codes_in_two_planes_are_read_as_words(
    kv: str, dims: tuple[int, int], compute: tl.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode with query heads that don't fill a tile, drafts and a chunk; a sequence of one key."""
    if compute is not None:
        monkeypatch.setattr(kernel, "compute_dtype", lambda code, q, words: compute)
    cache, tables = filled(kv, dims, [41, 7, 1, 70])
    poisoned_memory(monkeypatch)
    q = rows_like_kv(11, 6, dims[0], 9)
    formats = cache.layer(1).formats
    for found, fmt in ((_rows("k", q, cache), formats.k), (_rows("v", q, cache), formats.v)):
        assert (found.read.words, found.kind) == (True, PACKED[fmt.code.bits].value)
    batch = tables.batch([3, 1, 1, 6], [41, 7, 1, 70])
    compare(q, cache, batch, allowed=5e-6 if compute is None else 4e-3)


@pytest.mark.parametrize(
    ("kv", "dims"),
    [
        ("int5_g40", (80, 80)),  # 40 bytes of nibbles, 10 of bits
        ("int6_g6", (60, 60)),  # 15 words of pairs
    ],
)
def test_runs_that_do_not_fit_the_second_plane_are_unpacked_one_by_one(
    kv: str, dims: tuple[int, int]
) -> None:
    cache, tables = filled(kv, dims, [41], block_size=64)
    q = rows_like_kv(3, 6, dims[0], 9)
    assert not _rows("k", q, cache).read.words
    compare(q, cache, tables.batch([3], [41]))


def test_sequences_may_share_blocks() -> None:
    cache, tables = filled("int4", (64, 64), [40, 40])
    shared = Tables([tables.blocks[0], tables.blocks[0][:2] + tables.blocks[1][2:]], 16)
    compare(rows_like_kv(2, 6, 64, 9), cache, shared.batch([1, 1], [40, 40]))


@pytest.mark.parametrize(
    "kv",
    [
        *("int4", "int4_g16_rot", "int2", "int2_g16/int4", "fp8", "int8", "fp8/int4", "fp16"),
        *("int3", "int5_g16/int3_g64", "int6_g64_s8_rot", "int8/int5", "int6/bf16"),
    ],
)
def test_products_in_fp16_with_enlarged_weights_and_divided_queries(
    kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: scaled probabilities are enlarged, rows of q divided by a power of two."""
    monkeypatch.setattr(kernel, "compute_dtype", lambda code, q, words: tl.float16)
    cache, tables = filled(kv, (64, 64), [50, 20])
    q = rows_like_kv(3, 6, 64, 9) * torch.tensor([1e-4, 1.0, 3e5])[:, None, None]
    compare(q, cache, tables.batch([1, 2], [50, 20]), allowed=4e-3, scale=2e-6)


@pytest.mark.parametrize("size", [1e-3, 3e4])
@pytest.mark.parametrize(
    "kv", ["int2_g32", "int3_g32", "int4_g32", "int4", "int5_g32", "int6_g32", "int8", "fp8"]
)
def test_weights_in_fp16_hold_values_of_any_size(
    kv: str, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "compute_dtype", lambda code, q, words: tl.float16)
    cache = poisoned_cache(kv, [(64, 64)] * 2, kv_heads=3, q_heads=6, block_size=16, num_blocks=5)
    tables = Tables.scattered([50], 16, 5)
    k, v = rows_like_kv(50, 3, 64, 1), rows_like_kv(50, 3, 64, 2)
    cache.write(1, k, v * (size / v.abs().max()), torch.tensor(tables.slots(0, 0, 50)))
    compare(rows_like_kv(1, 6, 64, 3), cache, tables.batch([1], [50]), allowed=4e-3)


def means_cases() -> Iterator[Any]:
    """Every case, of which 8 hold every pair of values; the others are left to the long run."""
    kinds = ["int4_mean", "int4_g16_s8_mean/int4_g64_s8_mean_rot", "int8/int4_mean", "int3_mean/int2_mean"]
    values = [(128, 64), kinds, ([3, 1], [23, 2]), ("fp32", "fp16"), ({}, {"window": 70, "softcap": 3.0})]
    for dim, kv, new, compute, options in product(*(range(len(x)) for x in values)):
        low, high = dim ^ kv % 2, dim ^ kv // 2
        is_daily = (new, compute, options) == (low, high, low ^ high ^ dim)
        case = [x[i] for x, i in zip(values, (dim, kv, new, compute, options), strict=True)]
        yield pytest.param(*case, marks=[] if is_daily else pytest.mark.long)


@pytest.mark.parametrize(("dim", "kv", "new", "compute", "options"), list(means_cases()))
def test_means_of_blocks_are_keys_and_values_of_tiles_that_lie_in_one(
    dim: int, kv: str, new: list[int], compute: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read as words of codes are: with few rows those of all blocks together."""
    if compute == "fp16":
        monkeypatch.setattr(kernel, "compute_dtype", lambda code, q, words: tl.float16)
    monkeypatch.setattr(shapes, "_LEAST_SPLIT", 32)
    cache = poisoned_cache(kv, [(dim, dim)] * 2, kv_heads=2, q_heads=6, block_size=64, num_blocks=8)
    tables = Tables.scattered([130, 40], 64, 8)
    layer = cache.layer(1)
    for i, n in enumerate((130, 40)):
        rows = [rows_like_kv(n, 2, dim, seed) + rows_like_kv(1, 2, dim, seed + 9) for seed in (i, i + 50)]
        write_sequence(layer, *rows, tables.blocks[i])
    q = rows_like_kv(sum(new), 6, dim, 9)
    decode, extend = (own.fixed for own in kernel._planned(q, layer, AttentionOptions(scale=1.0)).attend)
    assert decode["APART"]
    assert decode["v"].read.words.value
    assert not extend["APART"]
    poisoned_memory(monkeypatch)
    compare(q, cache, tables.batch(new, [130, 40]), allowed=5e-6 if compute == "fp32" else 4e-3, **options)


def channel_cases() -> Iterator[Any]:
    """Every code, block size, dimension and arithmetic, each in the daily run once or more."""
    kinds = [
        *(("int4_per_channel/int4", 64), ("int8_per_channel/int8", 32), ("int3_per_channel/int3", 128)),
        *(("int2_per_channel/bf16", 128), ("int6_per_channel/int8", 128), ("int5_per_channel/int4_mean", 64)),
        *(("int4_per_channel/int8_per_channel", 128),),
    ]
    for i, (kv, dim) in enumerate(kinds):
        for j, (size, compute) in enumerate(product((16, 32, 48, 64), ("fp32", "fp16"))):
            marks = [] if j == 3 * i % 8 else pytest.mark.long
            yield pytest.param(kv, dim, size, compute, marks=marks)


@pytest.mark.parametrize(("kv", "dim", "size", "compute"), list(channel_cases()))
def test_scales_per_channel_go_to_queries_where_tiles_lie_in_one_block(
    kv: str, dim: int, size: int, compute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Channels have offsets and ranges of their own; one sequence decodes over several parts, one extends."""
    if compute == "fp16":
        monkeypatch.setattr(kernel, "compute_dtype", lambda code, q, words: tl.float16)
    monkeypatch.setattr(shapes, "_LEAST_SPLIT", 32)
    contexts = [2 * size + 5, size + 3]
    cache = poisoned_cache(kv, [(dim, dim)] * 2, kv_heads=3, q_heads=6, block_size=size, num_blocks=8)
    tables, layer = Tables.scattered(contexts, size, 8), cache.layer(1)
    ranges = torch.logspace(-2, 0.5, dim)[torch.randperm(dim, generator=torch.Generator().manual_seed(3))]
    for i, n in enumerate(contexts):
        k = (rows_like_kv(n, 3, dim, i) + 100 * rows_like_kv(1, 1, dim, 4)) * ranges
        write_sequence(layer, k, rows_like_kv(n, 3, dim, i + 50), tables.blocks[i])
    q = rows_like_kv(35, 6, dim, 9)
    decode, extend = (own.fixed for own in kernel._planned(q, layer, AttentionOptions(scale=1.0)).attend)
    assert decode["k"].read.words.value
    assert extend["k"].read.words.value
    assert decode["APART"]
    assert size % decode["KEYS"] == size % extend["KEYS"] == 0
    poisoned_memory(monkeypatch)
    allowed = 2e-5 if compute == "fp32" else 8e-3
    for options in ({}, {"window": 2 * size, "softcap": 3.0}):
        compare(q, cache, tables.batch([1, 34], contexts), allowed=allowed, scale=0.02 / dim**0.5, **options)


@pytest.mark.parametrize(
    ("kv", "dim", "size"),
    [
        *(
            ("int4_per_channel/int4", 60, 16),
            ("int4_per_channel/int4", 64, 7),
            ("int3_per_channel/int3", 64, 16),
        ),
        *(("int8_per_channel/int8", 40, 32), ("int4_per_channel_rot/int4", 64, 16)),
    ],
)
def test_other_rows_with_scales_per_channel_are_read_one_by_one(kv: str, dim: int, size: int) -> None:
    contexts = [2 * size + 1, 5]
    cache = poisoned_cache(kv, [(dim, dim)] * 2, kv_heads=3, q_heads=6, block_size=size, num_blocks=8)
    tables, layer = Tables.scattered(contexts, size, 8), cache.layer(1)
    for i, n in enumerate(contexts):
        rows = (rows_like_kv(n, 3, dim, i) + 5, rows_like_kv(n, 3, dim, i + 50))
        write_sequence(layer, *rows, tables.blocks[i])
    q = rows_like_kv(4, 6, dim, 9)
    assert not _rows("k", q, cache).read.words
    compare(q, cache, tables.batch([3, 1], contexts), allowed=2e-5)


@pytest.mark.parametrize("scale", [0.0, -0.1, float("nan")])
def test_a_scale_that_turns_scores_around_is_refused(scale: float) -> None:
    with pytest.raises(ConfigError, match=f"scale must be more than 0, got {scale}"):
        AttentionOptions(scale=scale)
