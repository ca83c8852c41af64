"""What lies between a decoder layer's products on a real GPU: the references' bytes, or within rounding.

TRITON_INTERPRET=0 python -m pytest tests/gpu
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvq.bench.kernels.measure import relative_error
from kvq.kernels.gated.reference import Activation
from kvq.kernels.gated.reference import gated as reference_gated
from kvq.kernels.rms_norm.reference import NormWeight
from kvq.kernels.rms_norm.reference import add_norm as reference_add_norm
from kvq.kernels.rope_write.reference import LayerHeads, Pairs
from kvq.kernels.rope_write.reference import rope_write as reference_rope_write
from tests.kernels.kit import KINDS, poisoned_cache

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from kvq.kernels.gated.triton import gated
from kvq.kernels.rms_norm.triton import AddNorm
from kvq.kernels.rope_write.triton import rope_write
from tests.gpu.test_kernels import bytes_of, layer_on_gpu

GPU = torch.device("cuda")
STEPS = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
DTYPES = list(STEPS)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def norm(dim: int, dtype: torch.dtype, device: torch.device) -> NormWeight:
    return NormWeight(weight=(1 + 0.1 * numbers(dim)).to(device, dtype), eps=1e-6)


def add_norm(x: Tensor, residual: Tensor, own: NormWeight, **options: Any) -> Tensor:
    return AddNorm(own, **options)(x, residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [60, 1024, 2560, 5120, 16_384, 32_768])
def test_sums_and_norms(dim: int, dtype: torch.dtype) -> None:
    x, residual = numbers(70, dim).to(dtype), 10 * numbers(70, dim, seed=1).to(dtype)
    for options in ({}, {"post": True, "scale": 0.5}):
        found = []
        for device, run in ((torch.device("cpu"), reference_add_norm), (GPU, add_norm)):
            own = norm(dim, dtype, device)
            given: dict[str, Any] = {**options, **({"post": own} if "post" in options else {})}
            sums = residual.to(device, copy=True)
            found.append((run(x.to(device), sums, own, **given).cpu(), sums.cpu()))
            one = residual[5:6].to(device, copy=True)
            alone = run(x[5:6].to(device), one, own, **given).cpu()
        assert torch.equal(alone, found[1][0][5:6])  # whatever the other rows
        for got, want in zip(found[1], found[0], strict=True):
            assert relative_error(got, want.double()) < 2 * STEPS[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", list(Activation))
def test_gates(activation: Activation, dtype: torch.dtype) -> None:
    for rows, n in ((1, 3072), (64, 14_336), (7, 60), (3000, 513)):
        x = (3 * numbers(rows, 2 * n)).to(dtype)
        want = reference_gated(x, activation)
        assert relative_error(gated(x.to(GPU), activation).cpu(), want.double()) < 2 * STEPS[dtype]


def checked(kv: str, layer: LayerHeads, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, bool]:
    """Queries and the reference's, and whether all bytes and flags are the reference's."""
    dims = (layer.k_dim, layer.v_dim)
    caches = [poisoned_cache(kv, [dims, dims], block_size=7, num_blocks=40) for _ in range(2)]
    on_gpu, heads = layer_on_gpu(caches[0], 1), numbers(tokens + 2, layer.width).to(dtype)
    heads[tokens // 2, -3] = float("nan")
    angle = 3 * numbers(tokens + 2, layer.rotary_dim // 2).repeat(1, 2)
    angles = angle.cos().to(dtype), angle.sin().to(dtype)
    slots = torch.randperm(280, generator=torch.Generator().manual_seed(0))[:tokens]
    flags = torch.zeros(tokens, dtype=torch.bool)
    moved, flagged = heads.to(GPU, copy=True), flags.to(GPU, copy=True)
    on = (angles[0].to(GPU), angles[1].to(GPU))
    rope_write(moved, on, on_gpu, slots.to(GPU), flagged, layer_to(layer, GPU))
    reference_rope_write(heads, angles, caches[1].layer(1), slots, flags, layer)
    q = layer.q_heads * layer.k_dim
    same = torch.equal(bytes_of(on_gpu), caches[1].pool(0)) and torch.equal(flagged.cpu(), flags)
    return moved.cpu()[:tokens, :q], heads[:tokens, :q], same


def layer_to(layer: LayerHeads, device: torch.device) -> LayerHeads:
    def moved(own: NormWeight) -> NormWeight:
        return NormWeight(weight=own.weight.to(device), eps=own.eps)

    norms = layer.norms and (moved(layer.norms[0]), moved(layer.norms[1]))
    bias = None if layer.bias is None else layer.bias.to(device)
    centers = tuple(None if center is None else center.to(device) for center in layer.centers)
    return replace(layer, norms=norms, bias=bias, centers=centers)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv", KINDS)
def test_written_bytes_and_queries_are_the_references(kv: str, dtype: torch.dtype) -> None:
    sizes: dict[str, Any] = {"q_heads": 7, "kv_heads": 3, "k_dim": 80, "v_dim": 64, "rotary_dim": 32}
    bias = numbers(7 * 80 + 3 * 144).to(dtype)
    for pairs, tokens, options in (
        (Pairs.HALVES, 20, {"bias": bias}),
        (Pairs.NEIGHBOURS, 100, {}),
        (Pairs.NEIGHBOURS_TWICE, 20, {"centers": (numbers(3, 80), numbers(3, 64))}),
    ):
        got, want, same = checked(kv, LayerHeads(**sizes, pairs=pairs, **options), tokens, dtype)
        assert same
        assert torch.equal(got, want)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("tokens", [1, 64, 200])
def test_normed_heads(tokens: int, together: bool) -> None:
    sizes: dict[str, Any] = {"q_heads": 32, "kv_heads": 3, "k_dim": 128, "v_dim": 128, "rotary_dim": 128}
    for dtype, step in STEPS.items():
        q_dim, k_dim = (32 * 128, 3 * 128) if together else (128, 128)
        norms = norm(q_dim, dtype, torch.device("cpu")), norm(k_dim, dtype, torch.device("cpu"))
        got, want, _ = checked("bf16", LayerHeads(**sizes, norms=norms), tokens, dtype)
        assert relative_error(got, want.double()) < 4 * step


def test_a_graph_of_a_layer_gives_what_its_calls_give() -> None:
    layer = LayerHeads(q_heads=8, kv_heads=3, k_dim=64, v_dim=64, rotary_dim=64)
    kv = layer_on_gpu(poisoned_cache("int4", [(64, 64)]), 0)
    own = norm(512, torch.bfloat16, GPU)
    x, sums = torch.randn(5, 512, device=GPU).bfloat16(), torch.randn(5, 512, device=GPU).bfloat16()
    heads = torch.randn(5, layer.width, device=GPU).bfloat16()
    angles = (torch.rand(5, 64, device=GPU).bfloat16(), torch.rand(5, 64, device=GPU).bfloat16())
    slots, bad = torch.arange(5, device=GPU), torch.zeros(5, dtype=torch.bool, device=GPU)

    def run() -> tuple[Tensor, ...]:
        some, turned = sums.clone(), heads.clone()
        normed = add_norm(x, some, own)
        rope_write(turned, angles, kv, slots, bad, layer)
        return some, normed, turned, gated(turned, Activation.SILU)

    want = run()
    stored = bytes_of(kv)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        got = run()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert torch.equal(bytes_of(kv), stored)
