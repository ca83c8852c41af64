"""Attention over gathered rows, in chunks forced small: beside the fused kernel, held to the reference."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvq.cache import KVCache
from kvq.kernels import AttentionOptions, SequenceBatch
from kvq.kernels.attend import gathered
from kvq.kernels.attend.gathered import attend_gathered, chosen, chunks, suits
from kvq.kernels.attend.reference import attend as reference
from kvq.kernels.attend.triton import attend as kernel
from kvq.kernels.attend.triton import step
from kvq.kernels.gpu import shapes
from tests.kernels.attend.triton.test_attend import SINKS, filled
from tests.kernels.kit import poisoned_cache, poisoned_memory, rows_like_kv

# A decode, many rows over a context, nothing, a draft, and a prompt from nothing.
NEW, CONTEXTS = [1, 9, 0, 2, 15], [12, 31, 7, 9, 15]
MANY = {1, 4}  # of those sequences, the ones that are gathered


@pytest.fixture(autouse=True)
def low(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 8 keys (3 heads of 64 in fp32), and few query rows are many."""
    monkeypatch.setattr(gathered, "SCRATCH_BYTES", 8 * 2 * 3 * 64 * 4)
    monkeypatch.setattr(gathered, "LEAST_ROWS", 18)
    monkeypatch.setattr(gathered, "LEAST_PAIRS", 15 * 6 * 10)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Which sequences were gathered."""
    found: list[int] = []

    def noted(*args: Any) -> None:
        found.extend(args[4])
        attend_gathered(*args)

    monkeypatch.setattr(kernel, "attend_gathered", noted)
    return found


def case(kv: str, dims: tuple[int, int] = (64, 64)) -> tuple[KVCache, SequenceBatch, Tensor]:
    cache, tables = filled(kv, dims, CONTEXTS)
    return cache, tables.batch(NEW, CONTEXTS), rows_like_kv(sum(NEW), 6, dims[0], 9)


def compare(kv: str, dims: tuple[int, int] = (64, 64), **options: Any) -> None:
    """Results of the whole batch: outputs relative to the largest, log-sum-exps absolutely."""
    cache, batch, q = case(kv, dims)
    settings = AttentionOptions(**{"scale": dims[0] ** -0.5, **options})
    want, want_lse = reference(q, cache.layer(1), batch, settings)
    out, lse = kernel.attend(q, cache.layer(1), batch, settings)
    assert float((out - want).abs().max() / want.abs().max()) < 5e-6
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


DAILY = ["bf16", "int4", "k8v4"]
PLAIN = {"bf16", "bf16_rot", "fp32"}  # no tile has to decode them
LATER = ["fp32", "fp8", "int8", "int4_g32_rot", "bf16_rot", "int2", "fp8_per_head/int4"]


@pytest.mark.parametrize("kv", [*DAILY, *(pytest.param(kv, marks=pytest.mark.long) for kv in LATER)])
def test_a_mixed_batch_in_every_format(kv: str, taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned_memory(monkeypatch)
    compare(kv)
    assert set(taken) == (set() if kv in PLAIN else MANY)


def test_sinks(taken: list[int]) -> None:
    compare("int8", sinks=SINKS)
    assert taken == [1, 4]


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"window": 31}, {1, 4}), ({"window": 20}, {4}), ({"softcap": 4.0}, set())],
)
def test_windows_that_bite_and_softcaps_stay_in_the_fused_kernel(
    options: dict[str, Any], expected: set[int], taken: list[int]
) -> None:
    compare("int4", **options)
    assert set(taken) == expected


@pytest.mark.parametrize("dims", [(80, 80), (60, 60), (64, 48)])
def test_head_dimensions(dims: tuple[int, int], taken: list[int]) -> None:
    compare("int4", dims)
    assert set(taken) == (MANY if dims == (80, 80) else set())


def test_layers_share_memory_and_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, batch, q = case("int8")
    rooms = []
    monkeypatch.setattr(kernel, "attend_gathered", lambda *args: rooms.append(gathered._scratch(*args[:3])))
    for layer in (0, 1, 0):
        kernel.attend(q, cache.layer(layer), batch, AttentionOptions(scale=0.1))
    assert len({id(room) for room in rooms}) == 1
    assert sum(x.nbytes for x in rooms[0]) <= gathered.SCRATCH_BYTES
    steps = [kept for kept in batch.kept.values() if isinstance(kept, step._Step)]
    assert len(steps) == 1


def test_the_fused_kernel_leaves_out_what_is_gathered() -> None:
    """Also where the engine gave the lengths, with all new tokens of the step."""
    cache, batch, q = case("int8")
    batch = replace(batch, lens=batch.device_lens())
    plan = kernel._planned(q, cache.layer(1), AttentionOptions(scale=0.1))
    found = step._step(batch, plan)
    assert found.gathered == [1, 4]
    [work] = found.works
    items = [item for item in work.items.items.tolist() if item[0] >= 0]
    assert sorted((sequence, first, new) for sequence, _, first, new, *_ in items) == [(0, 0, 1), (3, 10, 2)]


def test_a_captured_batch_is_never_gathered() -> None:
    _, batch, _ = case("int8")
    assert chosen(batch, 6, 2, None) == [1, 4]
    assert not chosen(replace(batch, is_captured=True), 6, 2, None)


@pytest.mark.parametrize("most", [1, 7, 24, 100])
@pytest.mark.parametrize(("start", "end"), [(0, 40), (61, 87), (61, 61), (61, 50), (5, 24), (0, 0)])
def test_chunks_hold_every_key_once_and_never_old_keys_with_new_ones(start: int, end: int, most: int) -> None:
    found = list(chunks(start, end, most))
    assert [key for begin, stop in found for key in range(begin, stop)] == list(range(end))
    assert all(stop - begin <= most and not begin < start < stop for begin, stop in found)


def test_rows_and_results_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where parts are not fp32 but what they are merged into is."""
    cache, batch, q = case("int8")
    monkeypatch.setattr(gathered, "SCRATCH_BYTES", 8 * 2 * 3 * 64 * 2)
    q = q.bfloat16()
    want, want_lse = reference(q.float(), cache.layer(1), batch, AttentionOptions(scale=0.125))
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:2])
    attend_gathered(q, cache.layer(1), batch, AttentionOptions(scale=0.125), [1, 4], (out, lse))
    rows = [*range(1, 10), *range(12, 27)]
    # The interpreter cuts off what bf16 lacks of a row, twice of what rounding costs.
    assert float((out - want)[rows].abs().max() / want.abs().max()) < 0.03
    torch.testing.assert_close(lse[rows], want_lse[rows], rtol=0.03, atol=0.03)
    assert not out[[0, 10, 11]].any()


def test_a_query_that_is_not_finite_spoils_its_own_row_and_no_other() -> None:
    cache, batch, q = case("int8")
    options = AttentionOptions(scale=0.125)
    clean, clean_lse = kernel.attend(q, cache.layer(1), batch, options)
    q[7, 1, 5], q[8, 2, 0] = math.nan, math.inf
    out, lse = kernel.attend(q, cache.layer(1), batch, options)
    spoilt = torch.zeros(q.shape[:2], dtype=torch.bool)
    spoilt[7, 1] = spoilt[8, 2] = True
    assert torch.equal(out[~spoilt], clean[~spoilt])
    assert torch.equal(lse[~spoilt], clean_lse[~spoilt])
    if flash_keeps_nan():
        assert torch.equal(out.isnan().all(dim=2), spoilt)
        assert torch.equal(~lse.isfinite(), spoilt)


def flash_keeps_nan() -> bool:
    """False with AVX-512, where torch's flash attention takes a row of NaN for one that sees nothing."""
    q = torch.full((1, 1, 2, 8), math.nan)
    out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q.nan_to_num(), q.nan_to_num())[0]
    return bool(out.isnan().all())


@pytest.mark.parametrize(
    ("kv", "dtype", "dims", "taken"),
    [
        ("int4", torch.bfloat16, (128, 128), True),
        ("bf16/int8", torch.bfloat16, (256, 256), True),
        ("bf16", torch.bfloat16, (256, 256), False),
        ("int8", torch.float16, (64, 64), True),
        ("int4", torch.float32, (128, 128), False),
        ("bf16", torch.float16, (64, 64), False),
        ("fp32/int8", torch.bfloat16, (64, 64), False),
        ("int8", torch.bfloat16, (64, 128), False),
        ("int8", torch.bfloat16, (60, 60), False),
        ("int8", torch.bfloat16, (264, 264), False),
    ],
)
def test_what_torchs_flash_attention_takes_on_a_gpu(
    kv: str, dtype: torch.dtype, dims: tuple[int, int], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = poisoned_cache(kv, [dims], num_blocks=1).layer(0)
    q: Any = SimpleNamespace(device=torch.device("cuda"), dtype=dtype)
    options = AttentionOptions(scale=0.1)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(shapes, "device_name", lambda _: "sm90")
    assert suits(q, layer, options) == taken
    assert not suits(q, layer, replace(options, softcap=3.0))
    monkeypatch.setattr(shapes, "device_name", lambda _: "gfx942")
    assert not suits(q, layer, options)
    monkeypatch.setattr(shapes, "device_name", lambda _: "sm90")
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert not suits(q, layer, options)
