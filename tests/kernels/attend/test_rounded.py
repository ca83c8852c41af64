"""attend with queries rounded to 8 bits, in the interpreter: the numbers of a reference that rounds alike."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvq.bench.kernels.attention import in_8_bits, over_blocks
from kvq.bench.kernels.measure import relative_error
from kvq.bench.kernels.workload import Workload
from kvq.kernels import AttentionOptions, Device, KernelSpec, PagedKV, SequenceBatch, registry
from kvq.kernels.attend import gathered
from kvq.kernels.attend.reference import attend as reference
from kvq.kernels.attend.reference import rounded_queries
from kvq.kernels.attend.triton import attend as kernel
from kvq.kernels.gpu import shapes
from tests.kernels.attend.triton.test_attend import SINKS, filled
from tests.kernels.kit import poisoned_memory, rows_like_kv

CONTEXTS, NEW = [70, 5, 40, 33], [1, 0, 13, 4]
A100, H100 = (
    Device(type="cuda", name="A100", capability=(8, 0)),
    Device(type="cuda", name="H100", capability=(9, 0)),
)


def compare(q: Tensor, kv: PagedKV, batch: SequenceBatch, **options: Any) -> None:
    settings = AttentionOptions(**{"scale": q.shape[2] ** -0.5, **options})
    want, want_lse = reference(rounded_queries(q, kv.formats.k), kv, batch, settings)
    out, lse = kernel.attend(q, kv, batch, settings, rounded=True)
    assert float((out - want).abs().max() / want.abs().max()) < 5e-6
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kv", "dims", "block_size", "options"),
    [
        ("fp8", (64, 48), 16, {"window": 9, "sinks": SINKS}),
        ("int8_rot", (64, 64), 32, {}),
        ("int8_per_head/int4", (48, 64), 64, {"softcap": 3.0}),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("fp8_rot", (96, 80), 64, {"sinks": SINKS}),
                ("fp8_per_head_rot/bf16", (128, 64), 32, {"window": 33}),
                ("int8", (60, 60), 17, {}),
                ("int8/fp8", (80, 16), 16, {"window": 20, "softcap": 3.0}),
                ("k8v4", (24, 32), 16, {}),
                ("fp8/int8", (17, 19), 16, {}),
                ("int8", (256, 192), 64, {}),
            )
        ),
    ],
)
def test_scores_are_those_of_rounded_queries(
    kv: str, dims: tuple[int, int], block_size: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes, drafts and chunks in one batch, some split over keys."""
    monkeypatch.setattr(shapes, "_LEAST_SPLIT", 32)
    cache, tables = filled(kv, dims, CONTEXTS, block_size=block_size)
    poisoned_memory(monkeypatch)
    compare(rows_like_kv(sum(NEW), 6, dims[0], 9), cache.layer(1), tables.batch(NEW, CONTEXTS), **options)


@pytest.mark.parametrize("share", [*(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 4, 8)), 16])
@pytest.mark.parametrize("kv", ["fp8", "int8"])
def test_query_heads_of_a_kv_head(kv: str, share: int) -> None:
    cache, tables = filled(kv, (64, 64), [40], kv_heads=1)
    compare(rows_like_kv(2, share, 64, 9), cache.layer(1), tables.batch([2], [40]))


@pytest.mark.parametrize(("kv", "largest"), [("int8", 1.5e-2), ("fp8", 5e-2)])
def test_rounding_costs_no_more_than_its_steps(kv: str, largest: float) -> None:
    """Rows with one channel of four times the others', relative to the largest output."""
    cache, tables = filled(kv, (64, 64), [200], kv_heads=2)
    q, batch, settings = rows_like_kv(4, 6, 64, 9), tables.batch([4], [200]), AttentionOptions(scale=0.125)
    want, _ = reference(q, cache.layer(1), batch, settings)
    out, _ = kernel.attend(q, cache.layer(1), batch, settings, rounded=True)
    error = float((out - want).abs().max() / want.abs().max())
    assert 1e-4 < error < largest


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_rows_of_zeros_and_of_nan_are_not_each_others(kv: str) -> None:
    cache, tables = filled(kv, (64, 64), [40], kv_heads=2)
    q, batch, settings = rows_like_kv(3, 4, 64, 9), tables.batch([3], [40]), AttentionOptions(scale=0.125)
    q[0, 0], q[1, 1, 5] = 0.0, math.nan
    want, _ = reference(q, cache.layer(1), batch, settings)
    out, _ = kernel.attend(q, cache.layer(1), batch, settings, rounded=True)
    assert torch.equal(out.isnan().any(dim=-1), want.isnan().any(dim=-1))
    torch.testing.assert_close(out[0, 0], want[0, 0])


def test_what_else_would_be_gathered_is_rounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "LEAST_ROWS", 2)
    monkeypatch.setattr(gathered, "LEAST_PAIRS", 1)
    cache, tables = filled("int8", (64, 64), [40])
    compare(rows_like_kv(4, 6, 64, 9), cache.layer(1), tables.batch([4], [40]))


def test_k_of_other_codes_is_multiplied_as_ever() -> None:
    cache, tables = filled("int4/fp8", (64, 64), [40])
    q, batch, settings = rows_like_kv(1, 6, 64, 9), tables.batch([1], [40]), AttentionOptions(scale=0.125)
    plain, _ = kernel.attend(q, cache.layer(1), batch, settings)
    assert torch.equal(kernel.attend(q, cache.layer(1), batch, settings, rounded=True)[0], plain)


def test_a_backend_to_be_named_and_never_chosen() -> None:
    cache, tables = filled("int8", (64, 64), [40], kv_heads=2)
    layer, batch, settings = cache.layer(1), tables.batch([1], [40]), AttentionOptions(scale=0.125)
    q = rows_like_kv(1, 4, 64, 9)

    def spec(kv: str) -> KernelSpec:
        formats = filled(kv, (64, 64), [1])[0].layer(1).formats
        return KernelSpec(formats=formats, q_heads=4, kv_heads=2, block_size=16)

    named = registry.select("attend", spec("int8"), A100, "triton-8bit")
    want, _ = kernel.attend(q, layer, batch, settings, rounded=True)
    assert torch.equal(named.run(q, layer, batch, settings)[0], want)
    assert registry.registered("triton-8bit") == registry.registered("triton")
    assert registry.select("attend", spec("int8"), H100).backend == "triton"
    assert registry.select("attend", spec("fp8"), H100, "triton-8bit").is_triton
    with pytest.raises(registry.UnsupportedKernel, match=r"8\.9 for products of FP8, A100 has 8\.0"):
        registry.select("attend", spec("fp8"), A100, "triton-8bit")
    amd = Device(type="cuda", name="MI300X", gfx="gfx942")
    with pytest.raises(registry.UnsupportedKernel, match="on NVIDIA GPUs, not on MI300X"):
        registry.select("attend", spec("int8"), amd, "triton-8bit")


@pytest.mark.parametrize("kv", ["int8_rot", "fp8"])
def test_a_benchmark_allows_what_rounding_costs(kv: str) -> None:
    workload = Workload(
        **{"contexts": (23, 40), "new": 1, "q_heads": 4, "kv_heads": 2, "head_dim": 32, "block_size": 16},
        **{"dtype": torch.float32, "device": torch.device("cpu"), "backend": "reference"},
    )
    own, cache, batch = over_blocks(workload, kv)
    rounded = in_8_bits(workload, own, cache, batch)
    error = relative_error(rounded.run(0)[-1:], own.truth)
    assert own.allowed < error < rounded.allowed
