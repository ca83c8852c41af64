"""Recent tokens beside the blocks: exact where they are held, quantized before, in any operation."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvq.cache import KvqCache
from kvq.cache.transformers.recent import RecentRows
from kvq.errors import ConfigError, OutOfMemory
from tests.cache.hf_kit import dense_attention_name, family_model, generate, left_padded
from tests.helpers_models import random_tokens

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.daily(10)
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize(
    ("family", "attention"),
    [*((f, "") for f in ("llama", "gemma3_text", "gpt_oss", "deepseek_v3")), ("llama", "kvq")],
)
@pytest.mark.parametrize("kv", ["int2_g4", "int4"])
def test_with_all_tokens_recent_the_tokens_are_those_of_dynamic_cache(
    family: str, attention: str, mode: str, kv: str
) -> None:
    model = family_model(family)
    model.set_attn_implementation(dense_attention_name(model))
    one_row = mode == "prompt lookup"
    ids, mask = (torch.tensor([random_tokens(25, seed=0)]), None) if one_row else left_padded([21, 9])
    mask = torch.ones_like(ids) if mask is None else mask
    want = generate(model, DynamicCache(config=model.config), ids, mask, **MODES[mode])
    model.set_attn_implementation(attention or dense_attention_name(model))
    cache = KvqCache(model.config, kv=kv, block_size=8, residual_length=64)
    assert torch.equal(generate(model, cache, ids, mask, **MODES[mode]), want)
    cache.check_integrity()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_both_attentions_see_the_same_recent_and_older_rows(family: str) -> None:
    model = family_model(family)
    ids = torch.tensor([random_tokens(40, seed=s) for s in (1, 2)])
    logits = {}
    for attention in ("sdpa", "kvq"):
        model.set_attn_implementation(attention)
        cache = KvqCache(model.config, kv="int4_g4", block_size=8, residual_length=6)
        with torch.inference_mode():  # one by one: "sdpa" shows a step all of its own tokens
            parts = [model(x, past_key_values=cache).logits for x in ids.split(1, dim=1)]
        logits[attention] = torch.cat(parts, dim=1)
    difference = (logits["sdpa"] - logits["kvq"]).abs().max() / logits["sdpa"].abs().max()
    assert difference < 2e-2  # a code may flip; a row out of place would change far more
    assert (logits["sdpa"].argmax(-1) == logits["kvq"].argmax(-1)).float().mean() > 0.95


@pytest.mark.parametrize("seed", range(8))
def test_random_steps_crops_and_reorders_keep_exactly_the_rows_that_are_held(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    limit, batch = rng.choice([1, 3, 7]), 3
    recent = RecentRows(limit)
    past: Tensor = torch.zeros(batch, 2, 0, 4)  # every token as it came
    held = 0
    for _ in range(60):
        roll = rng.random()
        if roll < 0.6:
            count = rng.choice([1, 1, 2, 9])
            new = torch.randn(batch, 2, count, 4)
            past = torch.cat([past, new], dim=2)
            k, v = recent.take(0, new, new + 1)
            exact = min(past.shape[2], held + count)
            assert torch.equal(k, past[:, :, -exact:])
            assert torch.equal(v, past[:, :, -exact:] + 1)
            held = min(limit, held + count)
        elif roll < 0.8:
            dropped = min(rng.choice([1, 2, 5]), past.shape[2])
            recent.truncate(dropped)
            past = past[:, :, : past.shape[2] - dropped]
            held = max(0, held - dropped)
        else:
            picked = torch.tensor([rng.randrange(batch) for _ in range(batch)])
            recent.select(picked)
            past = past[picked]


def test_recent_tokens_count_as_memory_and_help(tiny: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny.prepared.folder, dtype=torch.float32).eval()
    ids = torch.tensor([random_tokens(90, seed=1, vocab=tiny.geometry.vocab_size)])
    errors, sizes = [], []
    with torch.inference_mode():
        exact = model(ids).logits[:, -1]
        for length in (0, 16, 64):
            cache = KvqCache(model.config, kv="int2", residual_length=length)
            for piece in ids.split(10, dim=1):
                logits = model(piece, past_key_values=cache).logits[:, -1]
            errors.append(float((logits - exact).abs().max()))
            sizes.append(cache.nbytes)
    assert errors[0] > errors[1] > errors[2]
    row = 2 * 2 * 64 * 4 * model.config.num_hidden_layers  # K and V, KV heads, head_dim, fp32
    assert [size - sizes[0] for size in sizes] == [0, 20 * row, 80 * row]


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2", "gemma3_text"])
def test_sinks_softcaps_and_windows_see_recent_rows_too(family: str) -> None:
    model = family_model(family)
    ids = torch.tensor([random_tokens(40, seed=s) for s in (1, 2)])
    logits = {}
    for kv, recent in (("fp32", 0), ("int2_g4", 0), ("int2_g4", 6), ("int2_g4", 100)):
        model.set_attn_implementation("kvq")
        cache = KvqCache(model.config, kv=kv, block_size=8, residual_length=recent)
        with torch.inference_mode():
            parts = [model(x, past_key_values=cache).logits for x in ids.split([20, 1, 9, 1, 1, 7, 1], dim=1)]
        logits[kv, recent] = torch.cat(parts, dim=1)
        cache.check_integrity()
    exact = logits.pop(("fp32", 0))
    none, few, every = ((x - exact).abs().mean() / exact.abs().mean() for x in logits.values())
    assert every < 1e-5 < few < none


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2", "mistral"])
def test_padded_rows_shorter_than_the_recent_tokens_see_their_own(family: str) -> None:
    model = family_model(family)
    model.set_attn_implementation("kvq")
    ids, mask = left_padded([21, 5, 13])
    outs = []
    for kv, recent in (("fp32", 0), ("int2_g4", 64), ("int2_g4", 8)):
        cache = KvqCache(model.config, kv=kv, block_size=8, residual_length=recent)
        outs.append(generate(model, cache, ids, mask))
        cache.check_integrity()
    assert torch.equal(outs[0], outs[1]), "all rows are recent: as if nothing were quantized"
    assert outs[2].shape == outs[0].shape


@pytest.mark.parametrize("bad", [-1, 1.5, "many", True])
def test_a_residual_length_is_a_number_of_tokens(bad: Any) -> None:
    with pytest.raises(ConfigError, match="residual_length must be a number of tokens"):
        KvqCache(family_model("llama").config, residual_length=bad)


def test_more_recent_tokens_than_memory_are_refused_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    model = family_model("llama")
    with pytest.raises(ConfigError, match="recent must be 0 to 65536 tokens"):
        KvqCache(model.config, residual_length=65_537)
    cache = KvqCache(model.config, residual_length=65_536)
    monkeypatch.setattr("kvq.cache.memory.available_bytes", lambda device: 100_000)
    with pytest.raises(OutOfMemory, match="recent tokens"):
        model(torch.tensor([[1, 2]]), past_key_values=cache)
