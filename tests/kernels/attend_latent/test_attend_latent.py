"""attend_latent, against a dense fp64 softmax over the dequantized latents and rotary keys."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from kvq.cache import KVCache
from kvq.errors import UnsupportedKernel
from kvq.kernels import AttentionOptions, Device, KernelSpec, SequenceBatch, select
from kvq.kernels.attend.triton import step as attend_step
from kvq.kernels.attend_latent import triton as kernel
from kvq.kernels.attend_latent.cpu import attend_latent as cpu
from kvq.kernels.attend_latent.reference import attend_latent as reference
from kvq.kernels.gather_dense.triton import gather_dense
from kvq.kernels.gpu import shapes
from kvq.kernels.write_kv.triton import write_kv
from tests.kernels.attend.test_attend import dense
from tests.kernels.kit import Tables, poisoned_cache, poisoned_memory, rows_like_kv, unrotated

KERNELS = {
    "reference": reference,
    "triton": kernel.attend_latent,
    "cpu": cpu,
    "cpu-fp32": partial(cpu, exact=True),
}
CLOSE = {"cpu": 4e-5}  # max|a - b| / max|b|; of all others 5e-6
NEW, CONTEXTS = [1, 9, 0, 1, 5], [70, 31, 12, 1, 5]
SINKS = torch.tensor([0.0, 4.0, -3.0, 9.0, -math.inf])
CPU = Device(type="cpu", name="cpu")
H200 = Device(type="cuda", name="H200", capability=(9, 0))


def filled(
    kv: str, dims: tuple[int, int], *, heads: int = 5, block_size: int = 16
) -> tuple[KVCache, SequenceBatch, list[tuple[Tensor, Tensor]]]:
    """A poisoned cache whose second layer holds the sequences, the step, and each one's rows as stored."""
    need = sum(-(-n // block_size) for n in CONTEXTS) + 2
    cache = poisoned_cache(
        kv, [dims, dims], kv_heads=1, q_heads=heads, block_size=block_size, num_blocks=need
    )
    tables = Tables.scattered(CONTEXTS, block_size, need)
    rows = []
    for i, n in enumerate(CONTEXTS):
        k, v = rows_like_kv(n, 1, dims[0], i), rows_like_kv(n, 1, dims[1], i + 50)
        cache.write(1, k, v, torch.tensor(tables.slots(i, 0, n), dtype=torch.int64))
        rows.append((unrotated(cache, 1, "k", k), unrotated(cache, 1, "v", v)))
    return cache, tables.batch(NEW, CONTEXTS), rows


def check(
    name: str, kv: str, dims: tuple[int, int], *, heads: int = 5, block_size: int = 16, **options: Any
) -> None:
    """Of a batch of decodes and prompts, every row against fp64."""
    cache, batch, rows = filled(kv, dims, heads=heads, block_size=block_size)
    q = rows_like_kv(sum(NEW), heads, sum(dims), 77)
    settings = AttentionOptions(**{"scale": sum(dims) ** -0.5, **options})
    out, lse = KERNELS[name](q, cache.layer(1), batch, settings)
    at = 0
    for new, (rotary, latent) in zip(NEW, rows, strict=True):
        own = slice(at, at + new)
        at += new
        want, want_lse = dense(q[own], torch.cat((latent, rotary), dim=-1), latent, **vars_of(settings))
        if new:
            assert float((out[own] - want).abs().max() / want.abs().max()) < CLOSE.get(name, 5e-6)
            far = 1e-4 if name in CLOSE else 1e-5
            torch.testing.assert_close(lse[own].double(), want_lse, rtol=far, atol=far)


def vars_of(options: AttentionOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("scale", "window", "softcap", "sinks")}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    "kv",
    [
        *("bf16", "fp16/fp8", "bf16/int8", "int8", "bf16/int4_g16", "int4", "fp8_per_head", "bf16/int2"),
        *("bf16/int8_rot", "int8_rot/int4_g8_rot", "fp8_rot/fp8_per_head_rot"),
    ],
)
def test_every_format_attends_as_dense_softmax_over_what_it_stored(name: str, kv: str) -> None:
    check(name, kv, (16, 64))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("dims", "heads", "block_size", "kv"),
    [
        ((24, 96), 1, 5, "bf16/int4_g12"),
        ((64, 512), 16, 32, "bf16/int4_g64_rot"),
        ((64, 512), 3, 64, "int8"),
        ((20, 160), 40, 17, "fp8"),
        ((16, 16), 3, 16, "bf16/int4"),
        ((32, 256), 7, 16, "bf16/int4"),
    ],
)
def test_any_dimensions_heads_and_blocks(
    name: str, dims: tuple[int, int], heads: int, block_size: int, kv: str
) -> None:
    check(name, kv, dims, heads=heads, block_size=block_size)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("options", [{"window": 9, "softcap": 3.0}, {"sinks": SINKS}, {"softcap": 0.5}])
def test_windows_softcaps_and_sinks(name: str, options: dict[str, Any]) -> None:
    check(name, "bf16/int8", (16, 64), **options)


@pytest.mark.parametrize("kv", ["bf16/int4_g16_rot", "int8"])
def test_keys_split_over_programs_merge_to_the_same(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a captured graph, whose host knows only an upper limit of the contexts."""
    monkeypatch.setattr(shapes, "_LEAST_SPLIT", 32)
    cache, batch, _ = filled(kv, (16, 64))
    poisoned_memory(monkeypatch)
    q = rows_like_kv(sum(NEW), 5, 80, 9)
    options = AttentionOptions(scale=0.1, sinks=SINKS)
    limits = replace(batch, context_lens=(4096,) * len(CONTEXTS), lens=batch.device_lens(), is_captured=True)
    want, want_lse = reference(q, cache.layer(1), batch, options)
    out, lse = kernel.attend_latent(q, cache.layer(1), limits, options)
    assert float((out - want).abs().max() / want.abs().max()) < 5e-6
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
    [step] = [kept for kept in limits.kept.values() if isinstance(kept, attend_step._Step)]
    assert len(step.works) == 2
    assert all(work.items.parts > 1 for work in step.works)


@pytest.mark.parametrize("size", [1e-3, 3e4])
@pytest.mark.parametrize("kv", ["int4_g16", "int8", "fp8"])
def test_products_in_fp16_hold_values_of_any_size(
    kv: str, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: weights are enlarged, queries divided by a power of two."""
    monkeypatch.setattr(kernel, "compute_dtype", lambda code, q, words: tl.float16)
    cache = poisoned_cache(kv, [(16, 64)], kv_heads=1, q_heads=5, block_size=16, num_blocks=5)
    tables = Tables.scattered([50], 16, 5)
    k, v = rows_like_kv(50, 1, 16, 1), rows_like_kv(50, 1, 64, 2)
    cache.write(0, k, v * (size / v.abs().max()), torch.tensor(tables.slots(0, 0, 50)))
    q = rows_like_kv(2, 5, 80, 3) * torch.tensor([1e-4, 3e5])[:, None, None]
    batch, options = tables.batch([2], [50]), AttentionOptions(scale=2e-6 / size)
    want, _ = reference(q, cache.layer(0), batch, options)
    out, _ = kernel.attend_latent(q, cache.layer(0), batch, options)
    assert float((out - want).abs().max() / want.abs().max()) < 4e-3


@pytest.mark.parametrize("name", KERNELS)
def test_absorbed_queries_give_what_expanded_heads_give(name: str) -> None:
    """q (W_k c) = (W_k^T q) c, and the sum of p W_v c is W_v of the sum: DeepSeek-V2, appendix C."""
    cache, batch, rows = filled("bf16/int8", (16, 64))
    random = torch.Generator().manual_seed(1)
    own, rotary = (torch.randn(sum(NEW), 5, n, generator=random) for n in (24, 16))
    w_k, w_v = (torch.randn(5, 24, 64, generator=random) for _ in range(2))
    q = torch.cat((torch.einsum("thd,hdc->thc", own, w_k), rotary), dim=-1)
    latents, _ = KERNELS[name](q, cache.layer(1), batch, AttentionOptions(scale=0.02))
    out = torch.einsum("thc,hdc->thd", latents, w_v)
    at = 0
    for new, (turned, latent) in zip(NEW, rows, strict=True):
        k = torch.cat((torch.einsum("txc,hdc->thd", latent, w_k), turned.expand(-1, 5, -1)), dim=-1)
        v = torch.einsum("txc,hdc->thd", latent, w_v)
        mine = torch.cat((own, rotary), dim=-1)[at : at + new]
        want, _ = dense(mine, k, v, scale=0.02)
        torch.testing.assert_close(out[at : at + new].double(), want, rtol=1e-4, atol=1e-4)
        at += new


def long_context(kv: str, latent: int, q_heads: int, new: int) -> tuple[Tensor, KVCache, SequenceBatch]:
    """Queries of the last tokens of 2,500, in blocks that end within tiles."""
    cache = poisoned_cache(kv, [(32, latent)], kv_heads=1, q_heads=q_heads, block_size=48, num_blocks=60)
    tables = Tables.scattered([2500], 48, 60)
    k, v = rows_like_kv(2500, 1, 32, 1), rows_like_kv(2500, 1, latent, 2)
    cache.write(0, k, v, torch.tensor(tables.slots(0, 0, 2500)))
    return rows_like_kv(new, q_heads, 32 + latent, 3), cache, tables.batch([new], [2500])


@pytest.mark.parametrize("name", ["cpu", "cpu-fp32"])
@pytest.mark.parametrize("kv", ["fp32", "fp16", "bf16/int3", "fp8/int4_g64", "int8", "bf16/int4_g16", "int6"])
def test_long_contexts_of_many_heads_on_cpus(name: str, kv: str) -> None:
    """Several splits, tasks of all of a head's rows and of some, and blocks that end within tiles."""
    q, cache, batch = long_context(kv, 128, q_heads=21, new=7)
    options = AttentionOptions(scale=0.05, window=2211)
    want, want_lse = reference(q, cache.layer(0), batch, options)
    out, lse = KERNELS[name](q, cache.layer(0), batch, options)
    assert float((out - want).abs().max() / want.abs().max()) < CLOSE.get(name, 1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["cpu", "cpu-fp32"])
@pytest.mark.parametrize("kv", ["fp32", "int8", "int4_g16"])
def test_how_a_context_came_in_changes_no_bit_on_cpus(name: str, kv: str) -> None:
    cache, batch, _ = filled(kv, (16, 64))
    q = rows_like_kv(sum(NEW), 5, 80, 9)
    options = AttentionOptions(scale=0.1)
    out, lse = KERNELS[name](q, cache.layer(1), batch, options)
    at = 0
    for i, new in enumerate(NEW):
        for token in range(new):
            alone = replace(
                batch,
                query_lens=(1,),
                context_lens=(CONTEXTS[i] - new + 1 + token,),
                tables=batch.tables[i : i + 1],
            )
            got, got_lse = KERNELS[name](q[at : at + 1], cache.layer(1), alone, options)
            assert torch.equal(got[0], out[at])
            assert torch.equal(got_lse[0], lse[at])
            at += 1


@pytest.mark.parametrize("kv", ["bf16", "int8", "int4_g16"])
def test_how_many_threads_there_are_changes_no_bit_on_cpus(kv: str) -> None:
    """Of 100 query rows tasks have 64 or all, by whether there are parts of contexts for all threads."""
    q, cache, batch = long_context(kv, 64, q_heads=100, new=2)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(KERNELS["cpu"](q, cache.layer(0), batch, AttentionOptions(scale=0.1)))
    finally:
        torch.set_num_threads(before)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["cpu", "cpu-fp32"])
@pytest.mark.parametrize("kv", ["bf16/int8", "int8", "int4_g16"])
def test_a_query_that_is_not_finite_spoils_its_own_row_on_cpus(name: str, kv: str) -> None:
    cache, batch, _ = filled(kv, (16, 64))
    q = rows_like_kv(sum(NEW), 5, 80, 9)
    options = AttentionOptions(scale=0.1)
    clean, _ = KERNELS[name](q, cache.layer(1), batch, options)
    q[3, 2, 7] = math.inf
    out, _ = KERNELS[name](q, cache.layer(1), batch, options)
    assert out[3, 2].isnan().all()
    out[3, 2] = clean[3, 2]
    assert torch.equal(out, clean)


@pytest.mark.parametrize(("latent", "parts"), [(16, 1), (32, 2), (512, 4)])
def test_no_part_is_narrower_than_products(latent: int, parts: int) -> None:
    """Tensor cores sum over 16 columns at least; the interpreter takes fewer."""
    cache = poisoned_cache("bf16/int4", [(16, latent)], kv_heads=1, q_heads=5, block_size=16)
    q = torch.zeros(1, 5, 16 + latent)
    plan = kernel._planned(q, cache.layer(0), AttentionOptions(scale=1.0))
    assert plan.attend[0].fixed["PARTS"] == parts


def test_half_precision_queries_stay_theirs() -> None:
    cache, batch, _ = filled("bf16/int8_rot", (16, 64))
    q = rows_like_kv(sum(NEW), 5, 80, 9).to(torch.bfloat16)
    options = AttentionOptions(scale=0.1)
    want, _ = reference(q, cache.layer(1), batch, options)
    out, _ = kernel.attend_latent(q, cache.layer(1), batch, options)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out, want, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("kv", ["bf16/int4_g64_rot", "int8_rot", "fp8"])
def test_blocks_of_latents_are_written_and_gathered_with_the_references_bits(kv: str) -> None:
    caches = [poisoned_cache(kv, [(64, 512)], kv_heads=1, block_size=8, num_blocks=3) for _ in range(2)]
    k, v, slots = rows_like_kv(9, 1, 64, 1), rows_like_kv(9, 1, 512, 2), torch.randperm(24)[:9]
    write_kv(k, v, caches[0].layer(0), slots)
    caches[1].write(0, k, v, slots)
    assert torch.equal(caches[0].pool(0), caches[1].pool(0))
    table = torch.tensor([[slots[0] // 8]], dtype=torch.int32)
    at = int(slots[0] % 8)
    got = gather_dense(caches[0].layer(0), table, at, at + 1, unrotate=True)
    want = caches[1].gather(0, table, at, at + 1, unrotate=True)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_what_gpus_take_and_what_runs_elsewhere() -> None:
    def spec(kv_heads: int, latent: int) -> KernelSpec:
        cache = poisoned_cache("int8", [(64, latent)], kv_heads=kv_heads, q_heads=kv_heads)
        formats = cache.layer(0).formats
        return KernelSpec(formats=formats, q_heads=16, kv_heads=kv_heads, block_size=64)

    assert select("attend_latent", spec(1, 512), H200).backend == "triton"
    assert select("write_kv", spec(1, 512), H200).backend == "triton"
    assert select("attend_latent", spec(1, 512), CPU).backend == "cpu"
    assert select("attend_latent", spec(3, 512), CPU).backend == "reference"
    with pytest.raises(UnsupportedKernel, match="takes latents of one KV head for all query heads, not 3"):
        select("attend_latent", spec(3, 512), CPU, "cpu")
    with pytest.raises(UnsupportedKernel, match="takes latents of one KV head for all query heads, not 3"):
        select("attend_latent", spec(3, 512), H200, "triton")
    with pytest.raises(UnsupportedKernel, match="takes head dimensions up to 512"):
        select("attend_latent", spec(1, 1024), H200, "triton")
    with pytest.raises(UnsupportedKernel, match="takes head dimensions up to 256"):
        select("attend", spec(1, 512), H200, "triton")
