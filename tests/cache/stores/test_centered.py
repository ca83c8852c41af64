"""Centered rows: attention, log-sum-exps and gathered rows are those of rows that were never centered."""

from dataclasses import replace

import pytest
import torch

from kvq.cache import KVCache
from kvq.errors import ConfigError
from kvq.formats import Centers, KVRecipe, LayerCenters
from kvq.kernels import AttentionOptions, SequenceBatch
from kvq.kernels.attend.options import Part
from kvq.layout import plan_layout
from tests.kernels.kit import CPU, geometry, rows_like_kv

DIM, HEADS, BLOCK = 64, 3, 5
BIAS = 40 * torch.randn(2, HEADS, DIM, generator=torch.Generator().manual_seed(3))  # of K and V


def cache_of(kv: str, *, k: bool = True, v: bool = True, softcap: float | None = None) -> KVCache:
    """A cache whose centers are the biases, or part of them."""
    model = replace(geometry([(DIM, DIM)], kv_heads=HEADS, q_heads=2 * HEADS), softcap=softcap)
    lists = [tuple(map(tuple, part.tolist())) for part in BIAS]
    layers = (LayerCenters(k=lists[0] if k else None, v=lists[1] if v else None),)
    centers = Centers(model_digest="d", text_digest="t", tokens=1, layers=layers)
    recipe = replace(KVRecipe.uniform(kv, [(DIM, DIM)]), centers=centers if k or v else None)
    layout = plan_layout(model, recipe, block_size=BLOCK)
    cache = KVCache(layout, num_blocks=[8], device=CPU, backend="reference")
    cache.pool(0).fill_(0xFF)
    return cache


def batch(tokens: int, queries: int) -> SequenceBatch:
    """One sequence in blocks 6, 1, 4, ..."""
    table = [6, 1, 4, 0, 2, 7, 3][: -(-tokens // BLOCK)]
    slots = [table[i // BLOCK] * BLOCK + i % BLOCK for i in range(tokens)]
    return SequenceBatch(
        query_lens=(queries,),
        context_lens=(tokens,),
        tables=torch.tensor([table], dtype=torch.int32),
        slots=torch.tensor(slots),
    )


def biased(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V with large constant parts."""
    k, v = (rows_like_kv(tokens, HEADS, DIM, seed) + bias for seed, bias in enumerate(BIAS))
    return k.to(dtype), v.to(dtype)


def truth(q, k, v, sinks):
    """fp64 attention of the last queries, and its log-sum-exp."""
    tokens, queries = k.shape[0], q.shape[0]
    k, v = (x.double().repeat_interleave(2, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * 0.125
    seen = torch.arange(tokens) <= torch.arange(tokens - queries, tokens)[:, None]
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.double()[:, None].expand_as(lse))
    return torch.einsum("hqk,khd->qhd", torch.exp(scores - lse[..., None]), v), lse.T


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("queries", "tokens"), [(1, 23), (7, 23), (23, 23)])
@pytest.mark.parametrize(("k", "v"), [(True, True), (True, False), (False, True)])
def test_attention_over_centered_rows_is_that_of_the_rows(
    k: bool, v: bool, queries: int, tokens: int, with_sinks: bool
) -> None:
    keys, values = biased(tokens)
    if not k:  # what is not centered has no bias here, or its own error would hide the other's
        keys -= BIAS[0]
    if not v:
        values -= BIAS[1]
    cache = cache_of("int4_g16", k=k, v=v)
    work = batch(tokens, queries)
    assert not cache.write(0, keys, values, work.slots).any()
    q = torch.randn(queries, 2 * HEADS, DIM, generator=torch.Generator().manual_seed(5))
    sinks = torch.linspace(-2, 30, 2 * HEADS) if with_sinks else None
    out, lse = cache.attend(0, q, work, AttentionOptions(scale=0.125, sinks=sinks))
    gathered = [x[0].transpose(0, 1) for x in cache.gather(0, work.tables, 0, tokens, unrotate=True)]
    for rows, dense in zip((keys, values), gathered, strict=True):
        assert (dense - rows).abs().max() < 1.0  # a step of int4, of rows of size 1 to 4
    expected, expected_lse = truth(q, *gathered, sinks)
    assert (out - expected).abs().max() < 1e-3 * expected.abs().max()
    assert (lse - expected_lse).abs().max() < 1e-3


def test_without_centers_the_bias_costs_what_centering_saves() -> None:
    """The biases are 40, the rows' own size 1: 4 bits of the range of both keep little of the rows."""
    keys, values = biased(23)
    work = batch(23, 23)
    errors = {}
    for centered in (True, False):
        cache = cache_of("int4_g64", k=centered, v=centered)
        cache.write(0, keys, values, work.slots)
        dense = cache.gather(0, work.tables, 0, 23, unrotate=True)[0][0].transpose(0, 1)
        errors[centered] = float((dense - keys).square().mean())
    assert errors[True] < errors[False] / 50


@pytest.mark.parametrize("kv", ["int4_g16_rot", "int4_g16", "int2_g16_rot"])
def test_rows_gathered_rotated_are_the_rotation_of_those_gathered_plain(kv: str) -> None:
    from kvq.kernels.codec import rotate

    cache, work = cache_of(kv), batch(23, 23)
    cache.write(0, *biased(23), work.slots)
    plain = cache.gather(0, work.tables, 0, 23, unrotate=True)
    for x, y in zip(plain, cache.gather(0, work.tables, 0, 23, unrotate=False), strict=True):
        assert torch.allclose(rotate(x) if kv.endswith("_rot") else x, y, atol=1e-3)


def test_a_part_without_keys_stays_empty() -> None:
    cache, work = cache_of("int4"), batch(23, 1)
    cache.write(0, *biased(23), work.slots)
    q = torch.randn(1, 2 * HEADS, DIM)
    none = Part(is_young=False, recent=23, block_size=cache.layout.block_size)
    out, lse = cache.attend(0, q, work, AttentionOptions(scale=0.125, part=none))
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.isneginf(lse).all()


def test_nan_is_still_found_in_its_own_token() -> None:
    cache, work = cache_of("int4"), batch(9, 9)
    keys, values = biased(9)
    keys[4, 1, 7], values[6, 0, 0] = torch.nan, torch.inf
    assert cache.write(0, keys, values, work.slots).nonzero().flatten().tolist() == [4, 6]


def test_capped_scores_and_centered_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"caps attention scores at 30.*K can't be centered"):
        cache_of("int4", softcap=30.0)
    cache_of("int4", k=False, softcap=30.0)


def test_bf16_rows_keep_their_dtype() -> None:
    cache, work = cache_of("int4"), batch(23, 3)
    cache.write(0, *biased(23, torch.bfloat16), work.slots)
    q = torch.randn(3, 2 * HEADS, DIM).bfloat16()
    out, _ = cache.attend(0, q, work, AttentionOptions(scale=0.125, sinks=torch.zeros(2 * HEADS)))
    assert out.dtype == torch.bfloat16
