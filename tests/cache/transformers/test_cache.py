"""KvqCache in transformers' generate: fp32 blocks give DynamicCache's own tokens, in every mode."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvq.cache import KvqCache
from kvq.cache.transformers.config import read_config
from tests.cache.hf_kit import FAMILIES, dense_attention_name, family_model, generate, left_padded, quiet
from tests.geometry.live import live_geometry
from tests.helpers_models import FAMILY_OPTIONS, random_tokens, small_config

MODES = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.1, "top_k": 25},
    "beams": {"do_sample": False, "num_beams": 4},
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return family_model(request.param)


@pytest.mark.daily(9)
@pytest.mark.parametrize("mode", list(MODES))
def test_left_padded_batches_give_the_tokens_of_dynamic_cache(model: Any, mode: str) -> None:
    ids, mask = left_padded([21, 9, 17])
    name = dense_attention_name(model)
    model.set_attn_implementation(name)
    want = generate(model, DynamicCache(config=model.config), ids, mask, **MODES[mode])
    for attention in (name, "kvq"):
        cache = KvqCache(model.config, kv="fp32", block_size=8)
        model.set_attn_implementation(attention)
        got = generate(model, cache, ids, mask, **MODES[mode])
        assert torch.equal(got, want), attention
        cache.check_integrity()


@pytest.mark.parametrize("family", sorted(FAMILY_OPTIONS))
def test_configs_of_every_family_are_read_as_their_models_are(family: str) -> None:
    config = small_config(family)
    assert read_config(config).geometry == live_geometry(config).expanded()  # what attention sees
    ours, theirs = KvqCache(config), DynamicCache(config=config)
    assert ours.is_sliding == theirs.is_sliding
    assert len(ours) == len(theirs)


@pytest.mark.parametrize("family", ["gemma3_text", "mistral", "llama"])
def test_mask_sizes_and_lengths_are_dynamic_caches_own_and_update_keeps_to_them(family: str) -> None:
    config = small_config(family)
    ours, theirs = KvqCache(config, kv="fp32", block_size=4), DynamicCache(config=config)
    geometry = live_geometry(config).layers
    torch.manual_seed(0)
    for count in (5, 1, 13, 1, 1, 30, 1):
        for layer in geometry:
            advertised = theirs.get_mask_sizes(count, layer.index)
            assert ours.get_mask_sizes(count, layer.index) == advertised
            k = torch.randn(3, layer.kv_heads, count, layer.k_head_dim)
            v = torch.randn(3, layer.kv_heads, count, layer.v_head_dim)
            got, want = ours.update(k, v, layer.index), theirs.update(k, v, layer.index)
            assert got[0].shape[2] == advertised[0]
            assert torch.equal(got[0], want[0])
            assert torch.equal(got[1], want[1])
            assert ours.get_seq_length(layer.index) == theirs.get_seq_length(layer.index)


def test_a_plain_loop_without_position_ids_hides_padding_as_sdpa_does() -> None:
    model = family_model("llama")
    ids, mask = left_padded([12, 5])
    logits = {}
    for attention in ("sdpa", "kvq"):
        cache = KvqCache(model.config, kv="fp32", block_size=4)
        model.set_attn_implementation(attention)
        logits[attention] = _loop(model, cache, ids, mask)
    kept = mask.bool()
    assert torch.allclose(logits["sdpa"][kept], logits["kvq"][kept], atol=1e-4)
    cache = KvqCache(model.config, kv="fp32", block_size=4)
    ignored = _loop(model, cache, ids, torch.ones_like(mask))
    assert not torch.allclose(ignored[kept], logits["kvq"][kept], atol=1e-2), "padding makes no difference"


@torch.no_grad()
def _loop(
    model: Any, cache: KvqCache, ids: Tensor, mask: Tensor, steps: Iterable[int] = (0, 4, 9, 11, 12)
) -> Tensor:
    ends = pairwise(steps)
    parts = [model(ids[:, a:b], attention_mask=mask[:, :b], past_key_values=cache).logits for a, b in ends]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize(
    "kv",
    [
        *("int4", "int8", "int4_g4", "k8v4", "fp8", "int2", "int3", "int2_g4_rot"),
    ],
)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_both_modes_read_the_same_quantized_rows(family: str, kv: str) -> None:
    model = family_model(family)
    ids = torch.tensor([random_tokens(23, seed=i) for i in range(3)])
    name = dense_attention_name(model)
    logits = []
    for attention, backend in ((name, "auto"), ("kvq", "auto"), ("kvq", "reference")):
        cache = KvqCache(model.config, kv=kv, block_size=8, backend=backend)
        model.set_attn_implementation(attention)
        # where blocks are stored as wholes, "kvq" alone tells the tokens of one step apart
        steps = range(13) if "_" not in kv else (0, 4, 9, 11, 12)
        logits.append(_loop(model, cache, ids[:, :12], torch.ones(3, 12, dtype=torch.long), steps))
    scale = logits[0].abs().max()
    assert (logits[0] - logits[2]).abs().max() / scale < 2e-2  # a last bit may flip a code
    assert (logits[1] - logits[2]).abs().max() / scale < 2e-2
    assert (logits[0] - logits[2]).abs().mean() / scale < 1e-3


@pytest.mark.parametrize("attention", ["sdpa", "kvq"])
def test_chunked_prefill_and_long_sequences_grow_the_pools(attention: str) -> None:
    model = family_model("mistral")
    ids = torch.tensor([random_tokens(90, seed=1)])
    model.set_attn_implementation("sdpa")
    want = generate(model, DynamicCache(config=model.config), ids, torch.ones_like(ids), max_new_tokens=70)
    model.set_attn_implementation(attention)
    cache = KvqCache(model.config, kv="fp32", block_size=4)
    with quiet():
        got = generate(model, cache, ids, torch.ones_like(ids), max_new_tokens=70, prefill_chunk_size=16)
    assert torch.equal(got, want)
    assert cache.rows is not None
    window_blocks = cache.rows.manager.usage()[0].live
    assert window_blocks <= 16 // 4 + 1, "blocks that slid out were not given back"
    assert cache.rows.blocks.num_blocks[0] <= (16 + 16) // 4 + 2, "the pool holds more than window and chunk"
