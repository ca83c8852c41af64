"""rope_write: queries turned in place, keys turned and stored with the values, and nothing else touched."""

import math
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as neighbours_twice
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as neighbours
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as halves

from kvq.cache import KVCache
from kvq.errors import ConfigError
from kvq.kernels.rms_norm.reference import NormWeight
from kvq.kernels.rope_write.reference import LayerHeads, Pairs
from kvq.kernels.write_kv.reference import write_kv
from tests.kernels.kit import KINDS, poisoned_cache

Q_HEADS, KV_HEADS = 7, 3
SLOTS = torch.tensor([33, 7, 54])
TOKENS, PADDING = len(SLOTS), 2

rope_write: Any = None  # the implementation under test
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter


@pytest.fixture(autouse=True, params=["reference", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test below holds for every implementation."""
    found = import_module(f"kvq.kernels.rope_write.{request.param}")
    if request.param == "triton":  # many heads a program: the interpreter is slow; others in test_triton.py
        monkeypatch.setattr(found, "_FEW_ELEMENTS", found._ELEMENTS)
    monkeypatch.setitem(globals(), "rope_write", found.rope_write)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def layer_of(k_dim: int = 60, v_dim: int = 48, **options: Any) -> LayerHeads:
    options = {"rotary_dim": k_dim, **options}
    return LayerHeads(q_heads=Q_HEADS, kv_heads=KV_HEADS, k_dim=k_dim, v_dim=v_dim, **options)


def heads_of(layer: LayerHeads, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows with NaN beside them and in the padding."""
    memory = torch.full((TOKENS + PADDING, layer.width + 9), math.nan, dtype=dtype)
    rows = memory[:, 4 : layer.width + 4]
    rows[:TOKENS] = numbers(TOKENS, layer.width).to(dtype)
    return rows


def angles_of(layer: LayerHeads, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """As transformers gives them: every angle twice, side by side for Cohere, else in two halves."""
    angle = 3 * numbers(TOKENS + PADDING, layer.rotary_dim // 2)
    twice = layer.pairs is Pairs.NEIGHBOURS_TWICE
    angle = angle.repeat_interleave(2, 1) if twice else torch.cat((angle, angle), 1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def split(layer: LayerHeads, heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of the tokens: [tokens, heads, dim] each."""
    k_at, v_at = Q_HEADS * layer.k_dim, (Q_HEADS + KV_HEADS) * layer.k_dim
    parts = heads[:TOKENS, :k_at], heads[:TOKENS, k_at:v_at], heads[:TOKENS, v_at:]
    q, k, v = (x.unflatten(1, (n, -1)) for x, n in zip(parts, (Q_HEADS, KV_HEADS, KV_HEADS), strict=True))
    return q, k, v


def modules_turn(layer: LayerHeads, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Heads [tokens, heads, dim] as the code of transformers turns them."""
    turn = {Pairs.HALVES: halves, Pairs.NEIGHBOURS: neighbours, Pairs.NEIGHBOURS_TWICE: neighbours_twice}
    cos, sin = (a[None, :TOKENS] for a in angles)
    part = x[None, ..., : layer.rotary_dim].transpose(1, 2)
    turned = turn[layer.pairs](part, part, cos, sin)[0].transpose(1, 2)[0]
    return torch.cat((turned, x[..., layer.rotary_dim :]), -1)


def written(layer: LayerHeads, kv: str, k: Tensor, v: Tensor) -> KVCache:
    """A cache with these rows in the slots, by the reference."""
    cache = poisoned_cache(kv, [(layer.k_dim, layer.v_dim)])
    write_kv(k, v, cache.layer(0), SLOTS)
    return cache


def run(layer: LayerHeads, kv: str, heads: Tensor, angles: Any) -> tuple[KVCache, Tensor]:
    cache = poisoned_cache(kv, [(layer.k_dim, layer.v_dim)])
    bad = torch.zeros(len(heads), dtype=torch.bool)
    rope_write(heads, angles, cache.layer(0), SLOTS, bad, layer)
    return cache, bad


@pytest.mark.parametrize("kv", KINDS)
def test_turned_keys_and_values_are_stored_as_write_kv_stores_them(kv: str) -> None:
    layer = layer_of()
    heads, angles = heads_of(layer), angles_of(layer)
    q, k, v = (x.clone() for x in split(layer, heads))
    cache, bad = run(layer, kv, heads, angles)
    assert not bad.any()
    want = written(layer, kv, modules_turn(layer, k, angles), v)
    assert torch.equal(cache.pool(0), want.pool(0))
    left = split(layer, heads)
    assert torch.equal(left[0], modules_turn(layer, q, angles))
    assert torch.equal(left[1], k)
    assert torch.equal(left[2], v)
    assert heads[TOKENS:].isnan().all()  # padding
    assert heads._base is not None
    assert heads._base.isnan().sum() == (TOKENS + PADDING) * 9 + PADDING * layer.width


@pytest.mark.parametrize("pairs", list(Pairs))
@pytest.mark.parametrize(("k_dim", "rotary_dim"), [(64, 64), (80, 32), (60, 2)])
def test_heads_are_turned_as_the_modules_turn_them(pairs: Pairs, k_dim: int, rotary_dim: int) -> None:
    layer = layer_of(k_dim, 64, rotary_dim=rotary_dim, pairs=pairs)
    heads, angles = heads_of(layer), angles_of(layer)
    q, k, v = (x.clone() for x in split(layer, heads))
    cache, _ = run(layer, "fp32", heads, angles)
    assert torch.equal(split(layer, heads)[0], modules_turn(layer, q, angles))
    assert torch.equal(cache.pool(0), written(layer, "fp32", modules_turn(layer, k, angles), v).pool(0))


def test_angles_may_stand_once_and_apart() -> None:
    layer = layer_of()
    heads, angles = heads_of(layer), angles_of(layer)
    once = heads.clone()
    run(layer, "fp32", heads, angles)
    run(layer, "fp32", once, tuple(a[:, :30] for a in angles))
    assert torch.equal(once[:TOKENS], heads[:TOKENS])


def test_without_angles_queries_stay_and_keys_are_stored_as_they_are() -> None:
    layer = layer_of()
    heads = heads_of(layer)
    before = heads.clone()
    cache, _ = run(layer, "int4", heads, None)
    torch.testing.assert_close(heads, before, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(cache.pool(0), written(layer, "int4", *split(layer, before)[1:]).pool(0))


def norms_of(q_size: int, k_size: int) -> tuple[NormWeight, NormWeight]:
    return (
        NormWeight(weight=1 + 0.1 * numbers(q_size, seed=5), eps=1e-6),
        NormWeight(weight=1 + 0.1 * numbers(k_size, seed=6), eps=1e-2),
    )


def normed(x: Tensor, norm: NormWeight) -> Tensor:
    """fp64, over a head or over all of them."""
    rows = x.double() if norm.weight.numel() == x.shape[-1] else x.double().flatten(1)
    y = rows / (rows.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
    return y.view(x.shape)


def stored_floats(cache: KVCache, part: str) -> Tensor:
    rows = getattr(cache.layer(0), part).codes
    return rows[SLOTS // 5, :, SLOTS % 5].double()


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_biases_are_added_and_heads_normed_before_they_are_turned(together: bool, dtype: torch.dtype) -> None:
    norms = norms_of(60 * Q_HEADS, 60 * KV_HEADS) if together else norms_of(60, 60)
    layer = layer_of(norms=norms, rotary_dim=32)
    layer = replace(layer, bias=numbers(layer.width, seed=3).to(dtype))
    heads, angles = heads_of(layer, dtype), angles_of(layer, dtype)
    q, k, v = split(layer, (heads[:TOKENS] + layer.bias).double())
    cache, _ = run(layer, "fp32", heads, angles)
    exact = tuple(a.double() for a in angles)
    step = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    for got, x, norm in (
        (split(layer, heads)[0].double(), q, norms[0]),
        (stored_floats(cache, "k"), k, norms[1]),
    ):
        want = modules_turn(layer, normed(x, norm), exact)
        torch.testing.assert_close(got, want, rtol=step, atol=4 * step)
    assert torch.equal(stored_floats(cache, "v"), v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_centers_are_taken_off_what_is_stored(dtype: torch.dtype) -> None:
    centers = numbers(KV_HEADS, 60, seed=7), numbers(KV_HEADS, 48, seed=8)
    for kept in (centers, (centers[0], None), (None, centers[1])):
        layer = layer_of(centers=kept)
        heads, angles = heads_of(layer, dtype), angles_of(layer, dtype)
        _, k, v = (x.clone() for x in split(layer, heads))
        cache, _ = run(layer, "fp32", heads, angles)
        k = modules_turn(layer, k.float(), tuple(a.float() for a in angles)).to(dtype)
        parts = [x if c is None else (x.float() - c).to(dtype) for x, c in zip((k, v), kept, strict=True)]
        assert torch.equal(cache.pool(0), written(layer, "fp32", *parts).pool(0))


@pytest.mark.parametrize("kv", ["fp32", "int4", "fp8"])
def test_tokens_that_are_not_finite_are_flagged_beside_those_that_were(kv: str) -> None:
    layer = layer_of()
    heads, angles = heads_of(layer), angles_of(layer)
    _, k, v = split(layer, heads)
    split(layer, heads)[0][0, 6, 59] = math.nan  # a query: nothing is stored of it
    k[1, 2, 59], v[2, 0, 0] = math.inf, math.nan
    want = written(layer, kv, modules_turn(layer, k, angles), v)
    cache = poisoned_cache(kv, [(60, 48)])
    bad = torch.tensor([True, False, False, False, True])
    rope_write(heads, angles, cache.layer(0), SLOTS, bad, layer)
    assert bad.tolist() == [True, True, True, False, True]
    assert torch.equal(cache.pool(0), want.pool(0))


def test_a_token_is_the_same_among_any_others() -> None:
    layer = layer_of(norms=norms_of(60 * Q_HEADS, 60))
    heads, angles = heads_of(layer), angles_of(layer)
    alone, cache = heads.clone(), poisoned_cache("int4", [(60, 48)])
    together, _ = run(layer, "int4", heads, angles)
    for i in range(TOKENS):
        bad, one = torch.zeros(1, dtype=torch.bool), slice(i, i + 1)
        rope_write(alone[one], tuple(a[one] for a in angles), cache.layer(0), SLOTS[one], bad, layer)
    assert torch.equal(alone[:TOKENS], heads[:TOKENS])
    assert torch.equal(cache.pool(0), together.pool(0))


def test_no_tokens_change_nothing() -> None:
    layer = layer_of()
    heads, cache = heads_of(layer), poisoned_cache("int4", [(60, 48)])
    before, pool = heads.clone(), cache.pool(0).clone()
    bad, none = torch.zeros(0, dtype=torch.bool), torch.empty(0, dtype=torch.int64)
    rope_write(heads, angles_of(layer), cache.layer(0), none, bad, layer)
    torch.testing.assert_close(heads, before, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(cache.pool(0), pool)


def test_parts_that_do_not_fit_are_refused() -> None:
    for wrong in (
        {"rotary_dim": 31},
        {"rotary_dim": 62},
        {"norms": norms_of(60, 61)},
        {"norms": norms_of(60 * KV_HEADS, 60)},
        {"bias": numbers(60)},
        {"centers": (numbers(KV_HEADS, 48), None)},
    ):
        with pytest.raises(ConfigError, match="don't fit"):
            layer_of(**wrong)
    layer = layer_of()
    heads, (cos, sin), flags = heads_of(layer), angles_of(layer), torch.zeros(9, dtype=torch.bool)
    kv = poisoned_cache("int4", [(60, 48)]).layer(0)
    for rows, angles, bad in (
        (heads[:, 1:], (cos, sin), flags),
        (heads[:2], (cos, sin), flags),
        (heads.T.contiguous().T, (cos, sin), flags),
        (heads, (cos[:2], sin), flags),
        (heads, (cos, sin[:, :29]), flags),
        (heads, (cos, sin), flags[:2]),
    ):
        with pytest.raises(ConfigError, match="rope_write takes"):
            rope_write(rows, angles, kv, SLOTS, bad, layer)
