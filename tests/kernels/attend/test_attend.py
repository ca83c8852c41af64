"""attend, against a dense fp64 softmax over the dequantized K and V, row by row."""

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from kvq.cache import KVCache
from kvq.kernels import AttentionOptions, SequenceBatch
from kvq.kernels.attend import reference
from kvq.kernels.attend.options import Part
from kvq.kernels.merge_partials.reference import merge_partials
from kvq.kernels.write_kv.reference import write_kv
from kvq.layout import BlockOrder
from tests.kernels.backends import ATTENTION, kernel
from tests.kernels.kit import (
    CHANNELS,
    CPU,
    KINDS,
    MEANS,
    PER_CHANNEL,
    POISON,
    Tables,
    poisoned_cache,
    rows_like_kv,
    unrotated,
    write_sequence,
)

attend: Any = None  # the implementation under test
is_integer = False  # it multiplies INT8 and grouped codes with queries and weights rounded to 15 bits


@pytest.fixture(autouse=True, params=ATTENTION)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test below holds for every implementation."""
    monkeypatch.setitem(globals(), "attend", kernel("attend", request.param, monkeypatch))
    name: str = request.param
    monkeypatch.setitem(globals(), "is_integer", name.startswith("cpu:") and name != "cpu:portable")
    return name


NUM_BLOCKS = 40
BLOCK_SIZE = 5
OLD = Part(is_young=False, recent=6, block_size=BLOCK_SIZE)
YOUNG = Part(is_young=True, recent=6, block_size=BLOCK_SIZE)
PARTS = [
    *(replace(part, recent=recent) for part in (OLD, YOUNG) for recent in (0, 1, 6, 17, 100)),
    replace(OLD, first=10),
    replace(OLD, last=10),
    replace(OLD, first=10, last=20),
]
# prefill from nothing, chunk over context, decode, empty, decode of a first token, odd prefill
QUERY_LENS = [17, 9, 1, 0, 1, 33]
CONTEXT_LENS = [17, 31, 23, 12, 1, 33]


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    part: Part | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of the last rows of one sequence, one query at a time, in fp64.

    `q` [new, q_heads, k_dim]; `k`, `v` [context, kv_heads, dim].
    """
    new, q_heads, _ = q.shape
    context, kv_heads, _ = k.shape
    q, k, v = q.double(), *(x.double().repeat_interleave(q_heads // kv_heads, dim=1) for x in (k, v))
    out = torch.zeros(new, q_heads, v.shape[-1], dtype=torch.float64)
    lse = torch.zeros(new, q_heads, dtype=torch.float64)
    for i in range(new):
        position = context - new + i
        oldest, end = 0 if window is None else max(0, position + 1 - window), position + 1
        if chunk is not None:
            oldest = max(oldest, position - position % chunk)
        if part is not None and part.is_young:
            oldest = max(oldest, edge(part, position))
        elif part is not None:
            oldest, end = max(oldest, part.first), min(edge(part, position), part.last or context)
        end = max(oldest, end)
        scores = torch.einsum("thd,hd->ht", k[oldest:end], q[i]) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        logits = scores if sinks is None else torch.cat((scores, sinks[:, None].double()), dim=1)
        lse[i] = torch.logsumexp(logits, dim=1)
        weights = torch.exp(scores - lse[i, :, None])
        out[i] = torch.einsum("ht,thd->hd", weights, v[oldest:end])
    return out, lse


def edge(part: Part, position: int) -> int:
    """The first key that is young for a query."""
    return max(0, position + 1 - part.recent) // part.block_size * part.block_size


@lru_cache(maxsize=64)
def _written(
    kv: str,
    dims: tuple[int, int],
    heads: tuple[int, int],
    context_lens: tuple[int, ...],
    order: BlockOrder,
    fill: int,
    num_blocks: int,
    block_size: int,
) -> tuple[KVCache, list[Tensor], list[Tensor]]:
    """A cache whose second layer holds sequences, and what it gives for their K and V.

    Made once for all implementations, and copied for each: not to be changed.
    """
    q_heads, kv_heads = heads
    cache = poisoned_cache(
        kv,
        [dims, dims],
        kv_heads=kv_heads,
        q_heads=q_heads,
        block_size=block_size,
        num_blocks=num_blocks,
        order=order,
        fill=fill,
    )
    tables = Tables.scattered(list(context_lens), block_size, num_blocks)
    found: dict[str, list[Tensor]] = {"k": [], "v": []}
    for i, context in enumerate(context_lens):
        k, v = (rows_like_kv(context, kv_heads, dim, 2 * i + at) for at, dim in enumerate(dims))
        write_sequence(cache.layer(1), k, v, tables.blocks[i])
        found["k"].append(unrotated(cache, 1, "k", k))
        found["v"].append(unrotated(cache, 1, "v", v))
    return cache, found["k"], found["v"]


@dataclass
class Case:  # D376: cases written once, queries together in fp64
    """A batch of sequences whose K and V are written, and the queries of their new tokens."""

    kv: str = "fp32"
    dims: tuple[int, int] = (48, 48)
    heads: tuple[int, int] = (6, 3)  # query heads, KV heads
    query_lens: list[int] = field(default_factory=lambda: QUERY_LENS)
    context_lens: list[int] = field(default_factory=lambda: CONTEXT_LENS)
    order: BlockOrder = BlockOrder.LAYER_MAJOR
    dtype: torch.dtype = torch.float32
    fill: int = POISON
    unused: int = -1
    num_blocks: int = NUM_BLOCKS
    block_size: int = BLOCK_SIZE

    def __post_init__(self) -> None:
        self.tables = Tables.scattered(self.context_lens, self.block_size, self.num_blocks)
        self.batch: SequenceBatch = self.tables.batch(self.query_lens, self.context_lens, self.unused)
        written, k, v = _written(
            self.kv,
            self.dims,
            self.heads,
            tuple(self.context_lens),
            self.order,
            self.fill,
            self.num_blocks,
            self.block_size,
        )
        self.cache = KVCache(written.layout, num_blocks=written.num_blocks, device=CPU, backend="reference")
        for group in range(len(written.num_blocks)):
            self.cache.pool(group).copy_(written.pool(group))
        self.k, self.v = ([x.clone() for x in rows] for rows in (k, v))
        q_heads, _ = self.heads
        self.q = rows_like_kv(sum(self.query_lens), q_heads, self.dims[0], 77).to(self.dtype)

    def attend(self, **options: Any) -> tuple[Tensor, Tensor]:
        """Run the kernel on the whole batch."""
        asked = AttentionOptions(**{"scale": self.dims[0] ** -0.5, **options})
        return attend(self.q, self.cache.layer(1), self.batch, asked)

    def expected(self, **options: Any) -> tuple[Tensor, Tensor]:
        """The same by `dense`, sequence after sequence."""
        parts = [
            dense(q, k, v, **{"scale": self.dims[0] ** -0.5, **options})
            for q, k, v in zip(self.q.split(self.query_lens), self.k, self.v, strict=True)
        ]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def check(self, **options: Any) -> None:
        """Compare both."""
        out, lse = self.attend(**options)
        expected_out, expected_lse = self.expected(**options)
        assert out.shape == (sum(self.query_lens), self.heads[0], self.dims[1])
        assert lse.dtype == torch.float32
        check_against((out, lse), (expected_out, expected_lse), self.kv)


def check_against(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], kv: str) -> None:
    """Outputs to 2e-5 of the largest, log-sum-exps to 1e-5; with rounded queries and weights to 5e-4.

    With K's scales per channel queries are rounded after these, by the largest: 2e-3, a fiftieth of what the
    codes' own rounding costs.
    """
    rounded = is_integer and ("int" in kv or kv == "k8v4")
    bound = 2e-3 if "per_channel" in kv else 5e-4
    assert relative_error(got[0], want[0]) < (bound if rounded else 2e-5)
    lse = bound if rounded else 1e-5
    torch.testing.assert_close(got[1].double(), want[1], rtol=lse, atol=lse)


def relative_error(a: Tensor, b: Tensor) -> float:
    """max|a - b| / max|b|; of nothing but zeros 0."""
    largest = b.double().abs().max().clamp(min=1e-300)
    return ((a.double() - b.double()).abs().max() / largest).item()


def assert_same(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], backend: str) -> None:
    """Bit for bit on CPUs; on GPUs tile shapes depend on the step, and the order of additions with them."""
    if backend == "triton":
        assert relative_error(one[0], other[0]) < 1e-6
        torch.testing.assert_close(one[1], other[1], rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("order", list(BlockOrder))
@pytest.mark.parametrize("kv", [*KINDS, *MEANS, *CHANNELS])
def test_every_format_attends_as_dense_softmax_over_what_it_stored(kv: str, order: BlockOrder) -> None:
    Case(kv, order=order).check()


@pytest.mark.parametrize("kv", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (8, 1), (2, 2), (4, 2), (3, 3), (9, 3), (8, 8), (16, 8)])
def test_every_query_head_reads_its_groups_kv_head(heads: tuple[int, int], kv: str) -> None:
    Case(kv, heads=heads).check()


@pytest.mark.parametrize("kv", ["fp32", "int8", "int4", "int4_mean", "fp8_rot", PER_CHANNEL[0]])
@pytest.mark.parametrize("dims", [(60, 60), (80, 80), (96, 96), (192, 128), (48, 80), (64, 256)])
def test_any_head_dimension_and_k_unlike_v(dims: tuple[int, int], kv: str) -> None:
    Case(kv, dims=dims).check()


@pytest.mark.parametrize("dims", [(16, 24), (24, 40), (72, 32)])
def test_rows_of_floats_that_may_be_read_where_they_lie(dims: tuple[int, int]) -> None:
    """Blocks of as many tokens as registers have lanes, rows that fill some registers and not others."""
    Case(kv="fp32", dims=dims, block_size=16).check(window=20)


@pytest.mark.parametrize("window", [1, 2, 5, 7, 16, 32, 33, 100])
@pytest.mark.parametrize("kv", ["fp32", "int4"])
def test_a_window_counts_the_querys_own_position(window: int, kv: str) -> None:
    Case(kv).check(window=window)


@pytest.mark.parametrize("chunk", [1, 5, 7, 16, 31, 33, 100])
@pytest.mark.parametrize("kv", ["fp32", "int4"])
def test_a_query_sees_its_own_chunk_only(chunk: int, kv: str) -> None:
    Case(kv).check(chunk=chunk)


@pytest.mark.parametrize("kv", ["fp32", "int8", "int4_mean"])
def test_a_chunk_lies_within_a_window_softcap_and_sinks(kv: str) -> None:
    sinks = torch.tensor([0.0, 4.0, -3.0, 9.0, 1.0, -math.inf])
    Case(kv).check(chunk=12, window=7, softcap=20.0, sinks=sinks)
    Case(kv).check(chunk=7, part=YOUNG)
    Case(kv).check(chunk=22, part=OLD)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
@pytest.mark.parametrize("window", [None, 7])
def test_softcap_bounds_the_scaled_scores(softcap: float, window: int | None) -> None:
    Case("int8").check(softcap=softcap, window=window)
    Case("int8").check(softcap=softcap, window=window, scale=1.7)


@pytest.mark.parametrize("kv", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("window", [None, 7])
def test_sinks_join_the_softmax_and_the_log_sum_exp(kv: str, window: int | None) -> None:
    sinks = torch.tensor([0.0, 4.0, -3.0, 9.0, 1.0, -math.inf])
    Case(kv).check(sinks=sinks, window=window, softcap=20.0)


@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [
        ([1], [1]),
        ([1], [63]),
        ([63], [63]),
        ([5, 5], [5, 10]),
        ([0, 1, 0], [7, 8, 0]),
        ([4, 1, 6], [4, 6, 61]),
    ],
)
def test_any_mix_of_prefill_chunks_and_decodes(query_lens: list[int], context_lens: list[int]) -> None:
    for kv in ("fp32", "int3_g24", "int6_g12", "int4"):
        Case(kv, query_lens=query_lens, context_lens=context_lens).check()


@pytest.mark.parametrize("sinks", [None, torch.zeros(6)], ids=["", "sinks"])
def test_a_batch_without_new_tokens_gives_nothing(sinks: Tensor | None) -> None:
    out, lse = Case(query_lens=[0, 0], context_lens=[9, 0]).attend(sinks=sinks)
    assert out.shape == (0, 6, 48)
    assert lse.shape == (0, 6)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("kv", [*KINDS, *MEANS, *CHANNELS])
def test_what_lies_in_free_blocks_past_the_end_and_in_unused_table_entries_changes_nothing(
    kv: str, window: int | None
) -> None:
    options = {"window": window, "sinks": torch.linspace(-1, 1, 6)}
    clean = Case(kv, fill=0x00, unused=0).attend(**options)
    poisoned = Case(kv, fill=POISON, unused=(1 << 31) - 1).attend(**options)
    assert torch.isfinite(poisoned[0]).all()
    assert torch.equal(clean[0], poisoned[0])
    assert torch.equal(clean[1], poisoned[1])


@pytest.mark.parametrize("kv", ["fp32", "int4", "int4_g24", "int4_mean", "fp8"])
def test_blocks_that_fell_out_of_the_window_may_hold_anything(kv: str) -> None:
    case = Case(kv)
    before, wide = case.attend(window=6), case.attend(window=31)[0]
    for i, (new, context) in enumerate(zip(case.query_lens, case.context_lens, strict=True)):
        dead = max(0, context - new - 6 + 1)  # positions that no query sees any more
        for rows in (case.cache.layer(1).k, case.cache.layer(1).v):
            for block in case.tables.blocks[i][: dead // BLOCK_SIZE]:
                rows.codes[block] = -1 if rows.codes.dtype == torch.int8 else rows.codes.new_tensor(255)
                if rows.codes.is_floating_point():
                    rows.codes[block] = math.nan
                if rows.scales is not None:
                    rows.scales[block] = 255 if rows.scales.dtype == torch.uint8 else math.nan
    after = case.attend(window=6)
    assert not torch.equal(case.attend(window=31)[0], wide)  # the poison is there
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(("rows", "keys"), [(1, 256), (4, 256), (256, 1), (256, 8), (5, 24), (3, 5)])
def test_tiles_of_any_size_give_the_same(
    rows: int, keys: int, window: int | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend != "reference":
        pytest.skip("its tiles are compiled in")
    case = Case("int8")
    out, lse = case.attend(window=window, softcap=30.0)
    monkeypatch.setattr(reference, "_ROW_TILE", rows)
    monkeypatch.setattr(reference, "_KEY_TILE", keys)
    tiled_out, tiled_lse = case.attend(window=window, softcap=30.0)
    assert relative_error(tiled_out, out) < 1e-6
    torch.testing.assert_close(tiled_lse, lse, rtol=1e-6, atol=1e-6)
    case.check(window=window, softcap=30.0)


@pytest.mark.parametrize("kv", ["fp32", "bf16", "int4"])
@pytest.mark.parametrize(("dtype", "step"), [(torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8)])
def test_half_precision_queries_are_computed_in_fp32_and_rounded_once(
    dtype: torch.dtype, step: float, kv: str
) -> None:
    case = Case(kv, dtype=dtype)
    out, lse = case.attend()
    expected_out, expected_lse = case.expected()
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    slack = 1e-3 if is_integer and kv == "int4" else 1e-5
    assert ((out.double() - expected_out).abs() <= expected_out.abs() * step + slack).all()
    torch.testing.assert_close(lse.double(), expected_lse, rtol=slack, atol=slack)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_may_have_any_strides_and_are_left_alone(dtype: torch.dtype) -> None:
    case = Case("int8_rot", dtype=dtype)
    expected = case.attend()
    case.q = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    before = case.q.clone()
    turned = case.attend()
    assert torch.equal(expected[0], turned[0])
    assert torch.equal(case.q, before)


@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize("kv", ["fp32", "int8", "int4", "int4_mean", "int3_g24", "int6_g12"])
@pytest.mark.parametrize("part", [None, OLD, YOUNG], ids=["all", "old", "young"])
def test_chunk_size_and_batch_neighbours_change_no_bit(
    kv: str, window: int | None, part: Part | None, backend: str
) -> None:
    whole = Case(kv, query_lens=[33, 8], context_lens=[33, 21])
    out, lse = whole.attend(window=window, part=part)
    at = 0
    for new in (1, 7, 24, 1):
        batch = whole.tables.batch([new, 0], [at + new, 21])
        chunk = attend(
            whole.q[at : at + new],
            whole.cache.layer(1),
            batch,
            AttentionOptions(scale=48**-0.5, window=window, part=part),
        )
        assert_same(chunk, (out[at : at + new], lse[at : at + new]), backend)
        at += new
    assert at == 33


@pytest.mark.parametrize(
    ("kv", "dim"), [("int4_g48_rot", 48), ("int4_g32_s8", 64), ("int2_g32", 64), ("int3_mean/int4_mean", 64)]
)
def test_a_long_context_gives_the_same_bits_in_one_task_and_in_many(kv: str, dim: int, backend: str) -> None:
    if backend == "triton" and dim != 48:
        pytest.skip("slow in the interpreter")
    context, heads = (2600, (8, 1)) if backend != "triton" else (600, (8, 1))  # the interpreter is slow
    cache = poisoned_cache(kv, [(dim, dim)], kv_heads=1, q_heads=8, num_blocks=530)
    tables = Tables.scattered([context], BLOCK_SIZE, 530)
    k, v = rows_like_kv(context, 1, dim, 1), rows_like_kv(context, 1, dim, 2)
    write_sequence(cache.layer(0), k, v, tables.blocks[0])
    q = rows_like_kv(context, heads[0], dim, 3)
    count = 40  # 320 query rows: tasks take all keys; one token's 8 rows are cut along the keys
    for window in (None, context // 2 + 200):
        options = AttentionOptions(scale=0.14, window=window)
        many, many_lse = attend(q[-count:], cache.layer(0), tables.batch([count], [context]), options)
        one, one_lse = attend(q[-1:], cache.layer(0), tables.batch([1], [context]), options)
        assert_same((one, one_lse), (many[-1:], many_lse[-1:]), backend)
        want, want_lse = dense(
            q[-1:],
            unrotated(cache, 0, "k", k)[-(window or context) :],
            unrotated(cache, 0, "v", v)[-(window or context) :],
            scale=0.14,
        )
        check_against((one, one_lse), (want, want_lse), "int4")


def test_lse_allows_an_exact_merge_of_a_context_cut_in_two() -> None:
    case = Case("int8", query_lens=[1, 1], context_lens=[24, 24], heads=(6, 3))
    q = case.q[:1]
    halves = [dense(q, case.k[0][a:b], case.v[0][a:b], scale=48**-0.5) for a, b in ((0, 11), (11, 24))]
    out, lse = merge_partials(*(torch.stack(x).float() for x in zip(*halves, strict=True)))
    whole, whole_lse = case.attend()
    check_against((whole[:1], whole_lse[:1]), (out.double(), lse.double()), "int8")


@pytest.mark.parametrize(
    ("kv", "allowed"), [("fp32", 1e-5), ("bf16", 0.02), ("fp8", 0.15), ("int8", 0.03), ("int4_g24", 0.4)]
)
def test_rotation_changes_attention_by_no_more_than_the_quantization(kv: str, allowed: float) -> None:
    plain, rotated, exact = Case(kv), Case(f"{kv}_rot"), Case("fp32")
    error = relative_error(rotated.attend()[0], exact.attend()[0])
    assert error <= allowed
    assert relative_error(plain.attend()[0], rotated.attend()[0]) <= 2 * allowed
    assert kv == "fp32" or error > 1e-5  # it was quantized, and in other codes


def test_narrower_formats_are_further_from_exact_attention(backend: str) -> None:
    exact = Case("fp32").attend()[0]
    errors = [relative_error(Case(kv).attend()[0], exact) for kv in ("bf16", "int8", "int4", "int2")]
    assert errors == sorted(errors)
    assert errors[0] < 0.02
    assert errors[2] > 0.05
    assert errors[3] > 0.1


@pytest.mark.daily(110)
@pytest.mark.parametrize(
    ("kv", "dim"),
    [
        *(("int8", dim) for dim in (16, 32, 72, 160, 512, 576)),
        *(("int4_g16", dim) for dim in (32, 64, 128, 288)),
        *(("int4_g32", dim) for dim in (64, 128, 192)),
        *(("int4_g64", dim) for dim in (64, 128, 256, 512)),
        *(("int4_g128", dim) for dim in (128, 256, 512)),
        ("int4_g36_rot", 72),
        *(("int4_g32_s8", dim) for dim in (64, 128, 192, 512)),
        *((f"int4_g{group}_s8_rot", 128) for group in (16, 64, 128)),
        *(("int4_mean", dim) for dim in (64, 80, 96, 128)),
        ("int3_mean", 96),
        *((f"int{bits}_g32", dim) for bits in (2, 3, 5, 6) for dim in (64, 128)),
        *(("int2_g40", 80), ("int3_g20", 80), ("int5_g8", 80), ("int6_g80", 80)),  # groups end inside a part
        *(("int2_g24", 96), ("int3_g96", 96), ("int5_g48", 96), ("int6_g16", 96)),
        *(("int2_g128", 128), ("int3_g64", 256), ("int5_g64_rot", 128), ("int6_g64", 256)),
        *(("int2_g16", 128), ("int6_g16", 128), ("int5_g32", 512)),
    ],
)
def test_rows_of_any_width_and_groups_of_any_size_over_several_tiles(kv: str, dim: int, backend: str) -> None:
    if backend == "triton":
        pytest.skip("slow in the interpreter; its own tests have these widths")
    for heads in ((3, 3), (4, 1)):  # with one new token 1 and 4 rows, with 20 of them 20 and 80
        case = Case(
            kv,
            dims=(dim, dim),
            heads=heads,
            query_lens=[1, 20, 3],
            context_lens=[150, 85, 70],
            num_blocks=70,
        )
        case.check()
        case.check(window=66)


@pytest.mark.parametrize("kv", ["int8", "int4", "k8v4", "int6_g32"])
@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (16, 1)])
@pytest.mark.parametrize("sharpness", [0.3, 1.0, 4.0])
def test_default_arithmetic_is_closer_to_exact_than_torchs_bf16_attention(
    kv: str, heads: tuple[int, int], sharpness: float, backend: str
) -> None:
    if backend in ("reference", "triton"):
        pytest.skip("has tests of its own")
    case = Case(kv, dims=(128, 128), heads=heads, query_lens=[1, 24], context_lens=[190, 150], num_blocks=80)
    out, _ = case.attend(scale=sharpness / 128**0.5)
    for i, (q, got) in enumerate(zip(case.q.split([1, 24]), out.split([1, 24]), strict=True)):
        want, _ = dense(q, case.k[i], case.v[i], scale=sharpness / 128**0.5)
        new, context = len(q), case.context_lens[i]
        q_, k_, v_ = (x.transpose(0, 1)[None].bfloat16() for x in (q, case.k[i], case.v[i]))
        torchs = torch.nn.functional.scaled_dot_product_attention(
            q_,
            k_,
            v_,
            attn_mask=torch.ones(new, context, dtype=torch.bool).tril_(context - new),
            scale=sharpness / 128**0.5,
            enable_gqa=True,
        )[0].transpose(0, 1)
        assert relative_error(got, want) < 0.5 * relative_error(torchs, want)


def check_beside_a_sink(kv: str, context: int, score: float, v: Tensor) -> None:
    """One query over `context` keys, the eighth of which scores `score`; `v` [context, 1, 64]."""
    dim = v.shape[2]
    cache = poisoned_cache(kv, [(dim, dim)], kv_heads=1, q_heads=2, num_blocks=context // BLOCK_SIZE)
    tables = Tables.scattered([context], BLOCK_SIZE, context // BLOCK_SIZE)
    q, k = torch.ones(1, 2, dim), rows_like_kv(context, 1, dim, 5)
    k[7] = score / dim**0.5
    write_kv(k, v, cache.layer(0), torch.tensor(tables.slots(0, 0, context)))
    got = attend(q, cache.layer(0), tables.batch([1], [context]), AttentionOptions(scale=dim**-0.5))
    want = dense(q, unrotated(cache, 0, "k", k), unrotated(cache, 0, "v", v), scale=dim**-0.5)
    check_against(got, want, kv)


@pytest.mark.parametrize("kv", ["int8", "int4", "int2_g32", "int6_g32"])
def test_many_small_weights_beside_a_large_one_are_not_rounded_away(kv: str, backend: str) -> None:
    if backend == "triton":
        pytest.skip("works on floats")
    v = 1.0 + rows_like_kv(2000, 1, 64, 6)  # or the small weights' share would average out
    check_beside_a_sink(kv, 2000, 12.0, v)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kv", ["fp32", "int8", "int4"])
def test_a_query_that_is_not_finite_spoils_its_own_row_and_no_other(kv: str, bad: float) -> None:
    case = Case(kv)
    out, lse = case.attend()
    case.q[3, 1, 5] = bad
    spoilt, spoilt_lse = case.attend()
    assert spoilt[3, 1].isnan().all()
    assert not spoilt_lse[3, 1].isfinite()
    out[3, 1] = spoilt[3, 1] = 0
    lse[3, 1] = spoilt_lse[3, 1] = 0
    assert torch.equal(out, spoilt)
    assert torch.equal(lse, spoilt_lse)


@pytest.mark.parametrize("kv", ["int8", "int4", "int4_g24"])
def test_tiles_whose_weights_all_but_vanish_beside_an_earlier_one_add_nothing(kv: str) -> None:
    case = Case(kv, query_lens=[1, 20], context_lens=[150, 150], num_blocks=70)
    for i in range(2):
        k = case.k[i]
        k[:] = 0.01 * k
        k[5] = 9.0
        write_kv(
            k, case.v[i], case.cache.layer(1), torch.tensor(case.tables.slots(i, 0, 150), dtype=torch.int64)
        )
        case.k[i] = unrotated(case.cache, 1, "k", k)
        case.v[i] = unrotated(case.cache, 1, "v", case.v[i])
    case.q = 0.2 * torch.ones_like(case.q)
    for scale in (1.0, 1.02, 1.1, 5.0):  # e^-86 and less
        out, _ = case.attend(scale=scale)
        assert out.isfinite().all()
        assert relative_error(out, case.expected(scale=scale)[0]) < 5e-4


@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-38, 1e-30, 1e18, 1e30])
@pytest.mark.parametrize("kv", ["fp32", "int8", "int4"])
def test_queries_of_any_size_give_finite_outputs(kv: str, size: float) -> None:
    case = Case(kv)
    case.q = case.q * size
    out, _ = case.attend()
    assert out.isfinite().all()
    if size < 1e-20:  # no score differs from 0
        case.q = torch.zeros_like(case.q)
        assert relative_error(out, case.expected()[0]) < 5e-4


@pytest.mark.parametrize("kv", ["int8", "int4", "int3_g32", "int5_g64"])
@pytest.mark.parametrize("gap", [12.0, 24.0, 40.0])
def test_a_sink_without_a_value_hides_no_other(kv: str, gap: float, backend: str) -> None:
    if backend == "triton":
        pytest.skip("works on floats")
    v = rows_like_kv(300, 1, 64, 7)
    v[7] = 0.0
    check_beside_a_sink(kv, 300, gap, v)


@pytest.mark.parametrize("size", [16, 24, 32, 128])
@pytest.mark.parametrize("kv", ["int4_mean", "int3_mean/int4_mean"])
def test_means_of_blocks_that_tiles_hold_in_part_or_many_of(kv: str, size: int, backend: str) -> None:
    if backend == "triton":
        pytest.skip("slow in the interpreter")
    for heads in ((3, 3), (8, 2)):
        case = Case(
            kv,
            dims=(96, 96),
            heads=heads,
            query_lens=[1, 20, 3],
            context_lens=[300, 163, 63],
            num_blocks=600 // size + 3,
            block_size=size,
        )
        case.check()
        case.check(window=66, softcap=20.0)
        case.check(part=Part(is_young=False, recent=40, block_size=size, first=2 * size), window=250)


@pytest.mark.parametrize(("size", "dim"), [(16, 64), (32, 64), (32, 128), (64, 96), (96, 256), (128, 32)])
@pytest.mark.parametrize("bits", [8, 6, 5, 4, 3, 2])
def test_scales_of_channels_of_blocks_that_tiles_hold_in_part_or_many_of(
    bits: int, size: int, dim: int, backend: str
) -> None:
    if backend == "triton":
        pytest.skip("slow in the interpreter")
    for heads in ((3, 3), (14, 2)):
        case = Case(
            f"int{bits}_per_channel/int8",
            dims=(dim, 64),
            heads=heads,
            query_lens=[1, 20, 3, 1],
            context_lens=[300, 163, 63, 32],
            num_blocks=700 // size + 4,
            block_size=size,
        )
        case.check()
        case.check(window=66, softcap=20.0)
        case.check(part=Part(is_young=False, recent=40, block_size=size, first=2 * size), window=250)


@pytest.mark.daily(150)
@pytest.mark.parametrize("window", [None, 1, 9, 26])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kv", ["fp32", "int8", "int4", "int4_mean", "int4_per_channel/int4"])
def test_a_part_holds_the_keys_of_its_age_and_the_empty_one_nothing(
    kv: str, part: Part, window: int | None
) -> None:
    Case(kv).check(part=part, window=window, softcap=9.0)


@pytest.mark.parametrize("kv", ["fp32", "int4", "int4_mean", PER_CHANNEL[0]])
@pytest.mark.parametrize("window", [None, 21])
def test_parts_merge_to_all_keys_with_sinks_joining_once(kv: str, window: int | None) -> None:
    case, sinks = Case(kv), torch.linspace(-3, 3, 6)
    shared = {"window": window, "softcap": 20.0}
    parts = [replace(OLD, first=10), YOUNG, replace(OLD, last=10)]
    found = [case.attend(part=part, **shared) for part in parts]
    outs, lses = (torch.stack(x) for x in zip(*found, strict=True))
    check_against(merge_partials(outs, lses, sinks), case.expected(sinks=sinks, **shared), kv)


@pytest.mark.parametrize("is_young", [False, True], ids=["old", "young"])
@pytest.mark.parametrize("kv", ["fp32", "int4", "int4_mean", "int4_per_channel/int4"])
def test_blocks_outside_a_part_may_hold_anything_or_be_gone(kv: str, is_young: bool) -> None:
    case, part = (
        Case(kv),
        Part(is_young=is_young, recent=6, block_size=BLOCK_SIZE, first=BLOCK_SIZE, last=5 * BLOCK_SIZE),
    )
    before = case.attend(part=part)
    for i, (new, context) in enumerate(zip(case.query_lens, case.context_lens, strict=True)):
        low, high = edge(part, context - new), edge(part, context - 1)
        seen = range(low, context) if is_young else range(part.first, min(high, 5 * BLOCK_SIZE))
        for block in set(range(case.batch.tables.shape[1])) - {at // BLOCK_SIZE for at in seen}:
            case.batch.tables[i, block] = -7
    after = case.attend(part=part)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


def test_infinite_sinks_are_what_the_reference_makes_of_them(backend: str) -> None:
    if backend == "triton":
        pytest.skip("gives NaN")
    case = Case("int8", query_lens=[1, 2], context_lens=[3, 2])
    sinks = torch.tensor([math.inf, -math.inf, 0.0, math.inf, -math.inf, 0.0])
    for part in (None, OLD):
        out, lse = case.attend(sinks=sinks, part=part)
        options = AttentionOptions(scale=48**-0.5, sinks=sinks, part=part)
        want, want_lse = reference.attend(case.q, case.cache.layer(1), case.batch, options)
        torch.testing.assert_close(out, want, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rows", [64, 65, 96, 130])
def test_tasks_of_many_rows_give_the_bits_of_single_ones_over_several_splits(rows: int, backend: str) -> None:
    if backend == "triton":
        pytest.skip("slow in the interpreter")
    case = Case("int8", heads=(1, 1), query_lens=[rows], context_lens=[2200], num_blocks=450)
    out, lse = case.attend()
    for row in (0, 33, rows - 1):
        batch = case.tables.batch([1], [2200 - rows + row + 1])
        one = attend(case.q[row : row + 1], case.cache.layer(1), batch, AttentionOptions(scale=48**-0.5))
        assert_same(one, (out[row : row + 1], lse[row : row + 1]), backend)
