"""What generation does to a cache between steps: crop, beams, selection, reset, copies; and refusals."""

import copy
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvq.cache import KvqCache
from kvq.cache.transformers.config import read_config
from kvq.errors import ConfigError, ModelError, OutOfMemory, RequestError
from kvq.formats import Centers, KVRecipe, LayerCenters
from tests.cache.hf_kit import attention_of, dense_attention_name, family_model, generate, left_padded
from tests.helpers_models import build_model, random_tokens, small_config

ATTENTIONS = ["sdpa", "kvq"]
SLIDING = ["llama", "mistral", "gemma3_text"]


def _prompt(length: int, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.tensor([random_tokens(length, seed=i) for i in range(batch)])
    return ids, torch.ones_like(ids)


def _live_blocks(cache: KvqCache) -> int:
    assert cache.rows is not None
    return sum(usage.live for usage in cache.rows.manager.usage())


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", SLIDING)
@pytest.mark.parametrize("kind", ["prompt lookup", "assistant"])
def test_assisted_generation_gives_plain_greedy_tokens(family: str, attention: str, kind: str) -> None:
    model = family_model(family)
    part = random_tokens(7, seed=0)
    ids = torch.tensor([part * 4])
    model.set_attn_implementation("sdpa")
    want = generate(model, DynamicCache(config=model.config), ids, torch.ones_like(ids), max_new_tokens=30)
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 4}
    if kind == "assistant":
        options = {"assistant_model": build_model(small_config(family), seed=1)}
    model.set_attn_implementation(attention)
    cache = KvqCache(model.config, kv="fp32", block_size=4)
    got = generate(model, cache, ids, torch.ones_like(ids), max_new_tokens=30, **options)
    assert torch.equal(got, want)
    cache.check_integrity()


@pytest.mark.parametrize("kv", ["fp32", "int4_g4"])
@pytest.mark.parametrize("family", SLIDING)
def test_crop_takes_back_steps_as_if_they_had_not_been(family: str, kv: str) -> None:
    model = family_model(family)
    model.set_attn_implementation("sdpa")
    ids, _ = _prompt(40, batch=2)
    cache, plain = (KvqCache(model.config, kv=kv, block_size=4) for _ in range(2))
    cache.activate_past_recording()
    with torch.no_grad():
        for a, b, drop in ((0, 19, 0), (19, 27, 5), (22, 23, 0), (23, 31, 8), (23, 40, 0)):
            out = model(ids[:, a:b], past_key_values=cache).logits
            cache.crop(-drop)
            assert cache.get_seq_length() == b - drop
        for a, b in ((0, 19), (19, 22), (22, 23), (23, 40)):
            want = model(ids[:, a:b], past_key_values=plain).logits
    assert torch.allclose(out, want, atol=1e-4)
    cache.check_integrity()


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("recent", [0, 13])
@pytest.mark.parametrize("drop", [3, 13, 29])
def test_tokens_of_a_block_that_crop_opens_are_held_or_read_back(
    attention: str, recent: int, drop: int
) -> None:
    model = family_model("llama")
    model.set_attn_implementation(attention)
    ids, _ = _prompt(40, batch=2)
    cropped, plain = (
        KvqCache(model.config, kv="int8", block_size=8, residual_length=recent) for _ in range(2)
    )
    with torch.no_grad():
        for part in ids[:, :36].split(1, dim=1):
            model(part, past_key_values=cropped)
        cropped.crop(-drop)
        rest = ids[:, 36 - drop :].split(1, dim=1)
        found = [model(part, past_key_values=cropped).logits for part in rest]
        for part in ids[:, : 36 - drop].split(1, dim=1):
            model(part, past_key_values=plain)
        wanted = [model(part, past_key_values=plain).logits for part in rest]
    error = (torch.cat(found) - torch.cat(wanted)).abs().max() / torch.cat(wanted).abs().max()
    assert error < (1e-5 if drop == 3 else 2e-2), "of tokens that are read back a code may flip"
    cropped.check_integrity()


def test_a_crop_that_windows_do_not_allow_changes_nothing() -> None:
    model = family_model("gemma3_text")
    model.set_attn_implementation("sdpa")
    ids, _ = _prompt(60)
    cache = KvqCache(model.config, kv="int4", block_size=8)
    cache.activate_past_recording()
    with torch.no_grad():
        model(ids[:, :50], past_key_values=cache)
        cache.crop(-2)
        with pytest.raises(RequestError, match=r"can't drop 10 tokens: .* crop once"):
            cache.crop(-10)
        assert cache.get_seq_length() == 48
        model(ids[:, 48:49], past_key_values=cache)
    cache.check_integrity()


@pytest.mark.parametrize("kv", ["int8", "fp8", "k8v4"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_deep_copy_goes_on_as_the_original(kv: str, backend: str) -> None:
    model = family_model("llama")
    model.set_attn_implementation("kvq")
    ids, _ = _prompt(40, batch=2)
    cache = KvqCache(model.config, kv=kv, block_size=8, backend=backend)
    with torch.no_grad():
        model(ids[:, :21], past_key_values=cache)
        copied = copy.deepcopy(cache)
        found = [model(ids[:, 21:], past_key_values=one).logits for one in (copied, cache)]
    assert torch.equal(*found)


@pytest.mark.parametrize(("kv", "has_k"), [("int4_per_channel/int4_g4", False), ("int4_g4_mean", True)])
def test_centered_recipes_are_read_alike_by_both_attentions(kv: str, has_k: bool) -> None:
    model = family_model("llama")
    ids, _ = _prompt(30, batch=2)
    stored = read_config(model.config).stored
    draw = torch.Generator().manual_seed(1)
    layers = []
    for layer in stored.layers:
        k, v = (
            tuple(map(tuple, torch.randn(layer.kv_heads, dim, generator=draw).tolist()))
            for dim in (layer.k_head_dim, layer.v_head_dim)
        )
        layers.append(LayerCenters(k=k if has_k else None, v=v))
    centers = Centers(model_digest="d", text_digest="t", tokens=1, layers=tuple(layers))
    recipe = replace(KVRecipe.uniform(kv, stored.head_dims), centers=centers)
    logits = []
    for attention in ATTENTIONS:
        model.set_attn_implementation(attention)
        cache = KvqCache(model.config, kv=recipe, block_size=8)
        with torch.no_grad():
            parts = [model(part, past_key_values=cache).logits for part in ids.split(1, dim=1)]
        logits.append(torch.cat(parts, dim=1))
    assert (logits[0] - logits[1]).abs().max() / logits[0].abs().max() < 2e-2


def test_crop_beyond_a_window_needs_recording_and_crop_needs_sense() -> None:
    model = family_model("mistral")
    model.set_attn_implementation("sdpa")
    ids, mask = _prompt(40)
    cache = KvqCache(model.config, kv="fp32")
    generate(model, cache, ids, mask)
    with pytest.raises(RequestError, match="activate_past_recording"):
        cache.crop(-1)
    cache.crop(0)
    for wrong in (3, -1000):
        with pytest.raises(RequestError, match="crop takes"):
            cache.crop(wrong)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_beams_share_blocks_and_leave_none_behind(family: str, attention: str) -> None:
    model = family_model(family)
    model.set_attn_implementation(attention)
    ids, mask = left_padded([33, 18, 5])
    cache = KvqCache(model.config, kv="int4", block_size=4)
    generate(model, cache, ids, mask, num_beams=5)
    cache.check_integrity()
    assert cache.rows is not None
    held = _live_blocks(cache)
    assert held < sum(s.num_held for s in cache.rows.sequences), "beams of one prompt share its blocks"
    cache.reset()
    cache.check_integrity()
    assert _live_blocks(cache) == 0


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_reset_cache_serves_another_batch_size_from_the_same_bytes(attention: str) -> None:
    model = family_model("qwen3")
    model.set_attn_implementation(attention)
    cache = KvqCache(model.config, kv="int8", block_size=4)
    for lengths in ([25, 31, 7], [30], [4, 9]):
        ids, mask = left_padded(lengths)
        cache.reset()
        got = generate(model, cache, ids, mask)
        fresh = generate(model, KvqCache(model.config, kv="int8", block_size=4), ids, mask)
        assert torch.equal(got, fresh)
    assert cache.rows is not None
    before = cache.nbytes
    cache.reset()
    generate(model, cache, *left_padded([4, 9]))
    assert cache.nbytes == before


def test_rows_are_repeated_selected_and_reordered_as_dynamic_cache_does() -> None:
    model = family_model("gemma3_text")
    model.set_attn_implementation("sdpa")
    ids, _ = _prompt(21, batch=3)
    caches = KvqCache(model.config, kv="fp32", block_size=4), DynamicCache(config=model.config)
    logits = []
    for cache in caches:
        with torch.no_grad():
            model(ids, past_key_values=cache)
            cache.batch_repeat_interleave(2)  # rows 0 0 1 1 2 2
            model(ids[:, :2].repeat_interleave(2, dim=0) + torch.arange(6)[:, None], past_key_values=cache)
            cache.reorder_cache(torch.tensor([5, 5, 0, 2, 1, 1]))
            cache.batch_select_indices(torch.tensor([True, True, False, True, True, True]))
            cache.batch_select_indices(torch.tensor([4, 0, 1]))
            logits.append(model(ids[:, 3:7], past_key_values=cache).logits)
    assert torch.allclose(logits[0], logits[1], atol=1e-4)
    caches[0].check_integrity()
    with pytest.raises(RequestError, match="rows 0 to 2"):
        caches[0].batch_select_indices(torch.tensor([3]))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_deep_copy_goes_on_by_itself(attention: str) -> None:
    model = family_model("llama")
    model.set_attn_implementation(attention)
    ids, _ = _prompt(30)
    cache = KvqCache(model.config, kv="int4", block_size=4)
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
        twin = copy.deepcopy(cache)
        first = model(ids[:, 20:], past_key_values=twin).logits
        model(ids[:, 5:9], past_key_values=cache)
        again = model(ids[:, 20:], past_key_values=copy.deepcopy(cache)).logits
        fresh = KvqCache(model.config, kv="int4", block_size=4)
        model(ids[:, :20], past_key_values=fresh)
        want = model(ids[:, 20:], past_key_values=fresh).logits
    assert torch.equal(first, want)
    assert not torch.equal(again, want)
    assert twin.nbytes > 0
    twin.check_integrity()


def test_poisoned_free_blocks_and_scratch_never_reach_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    model = family_model("gemma3_text")
    ids, mask = left_padded([19, 6])
    for kv in ("int4", "int8", "fp32"):
        for attention in ATTENTIONS:
            model.set_attn_implementation(attention)
            want = generate(model, KvqCache(model.config, kv=kv, block_size=8), ids, mask)
            cache = KvqCache(model.config, kv=kv, block_size=8, max_tokens=60)
            with torch.no_grad():
                model(ids, attention_mask=mask, past_key_values=cache)
            cache.reset()
            assert cache.rows is not None
            for group in range(len(cache.rows.layout.groups)):
                cache.rows.blocks.pool(group).fill_(0xFF)  # NaN in every float format
            assert torch.equal(generate(model, cache, ids, mask), want), (kv, attention)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_nan_is_told_with_its_row_and_again_until_it_is_dropped(attention: str) -> None:
    model = family_model("llama")
    model.set_attn_implementation(attention)
    ids, _ = _prompt(6, batch=3)
    embeds = model.get_input_embeddings()(ids).detach().clone()
    embeds[1, 4] = float("nan")
    cache = KvqCache(model.config, kv="int4")
    with torch.no_grad():
        with pytest.raises(RequestError, match=r"rows \[1\] held NaN"):
            model(inputs_embeds=embeds, past_key_values=cache)
        with pytest.raises(RequestError, match="NaN"):
            model(ids[:, :1], past_key_values=cache)
        cache.batch_select_indices(torch.tensor([0, 2]))
        assert torch.isfinite(model(ids[:2, :1], past_key_values=cache).logits).all()
    cache.check_integrity()


def test_max_tokens_allocates_exactly_and_is_kept() -> None:
    model = family_model("llama")
    model.set_attn_implementation("sdpa")
    cache = KvqCache(model.config, kv="int4_g4", block_size=8, max_tokens=50)
    ids, mask = _prompt(30, batch=3)
    generate(model, cache, ids, mask, num_beams=2)
    assert cache.rows is not None
    assert cache.nbytes == 3 * 2 * 7 * cache.rows.layout.groups[0].block_bytes
    assert cache.get_max_length() == 50
    with pytest.raises(RequestError, match="max_tokens=50"), torch.no_grad():
        model(ids[:, :2].repeat_interleave(2, dim=0), past_key_values=cache)
    assert cache.get_seq_length() == 49


def test_a_pool_that_cannot_grow_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = family_model("llama")
    model.set_attn_implementation("sdpa")
    ids, _ = _prompt(30)
    cache = KvqCache(model.config, kv="fp32", block_size=4)
    with torch.no_grad():
        model(ids[:, :8], past_key_values=cache)
        with monkeypatch.context() as context:
            context.setattr("kvq.cache.memory.available_bytes", lambda device: 1000)
            with pytest.raises(OutOfMemory):
                model(ids[:, 8:], past_key_values=cache)
        out = model(ids[:, 8:], past_key_values=cache).logits
        want = model(ids).logits[:, 8:]
    assert torch.allclose(out, want, atol=1e-4)


def test_masks_that_blocks_cannot_follow_are_refused() -> None:
    model = family_model("llama")
    model.set_attn_implementation("kvq")
    ids, mask = _prompt(6, batch=2)
    for change in ((0, 5), (1, 2)):
        wrong = mask.clone()
        wrong[change] = 0
        with pytest.raises(RequestError, match="left"), torch.no_grad():
            model(ids, attention_mask=wrong, past_key_values=KvqCache(model.config))
    with pytest.raises(RequestError, match="of your own"), torch.no_grad():
        model(ids, attention_mask=torch.ones(2, 1, 6, 6).bool(), past_key_values=KvqCache(model.config))
    cache = KvqCache(model.config)
    padded = mask.clone()
    padded[0, :2] = 0
    with torch.no_grad():
        model(ids, attention_mask=padded, past_key_values=cache)
        with pytest.raises(RequestError, match="padding changed"):
            model(ids[:, :1], past_key_values=cache)
        more_padding = torch.ones(2, 10, dtype=torch.long)
        more_padding[0, :4] = 0
        with pytest.raises(RequestError, match="padding changed"):
            model(ids[:, :4], attention_mask=more_padding, past_key_values=cache)
        model.set_attn_implementation("sdpa")
        with pytest.raises(RequestError, match="not stored"):
            model(ids[:, :1], attention_mask=torch.ones(2, 7), past_key_values=cache)
        model.set_attn_implementation("kvq")
        right = torch.cat((padded, torch.ones(2, 1, dtype=torch.long)), dim=1)
        model(ids[:, :1], attention_mask=right, past_key_values=cache)
    assert cache.get_seq_length() == 7


def test_a_mask_that_the_model_lays_over_causal_attention_is_refused() -> None:
    from transformers.masking_utils import create_causal_mask

    model = family_model("llama")
    model.set_attn_implementation("kvq")
    ids, _ = _prompt(6)
    cache = KvqCache(model.config)
    mask = create_causal_mask(
        config=model.config,
        inputs_embeds=model.get_input_embeddings()(ids),
        attention_mask=None,
        past_key_values=cache,
        or_mask_function=lambda batch, head, query, key: query >= 0,
    )
    with pytest.raises(RequestError, match="of your own"), torch.no_grad():
        model(ids, attention_mask=mask[None], past_key_values=cache)


def test_a_second_turn_goes_on_from_the_first() -> None:
    model = family_model("gemma3_text")
    ids, mask = left_padded([12, 7])
    for attention in ATTENTIONS:
        model.set_attn_implementation(attention)
        caches = KvqCache(model.config, kv="fp32", block_size=4), DynamicCache(config=model.config)
        turns = []
        for cache in caches:
            model.set_attn_implementation(attention if isinstance(cache, KvqCache) else "sdpa")
            first = generate(model, cache, ids, mask)
            longer = torch.cat((first, ids[:, -3:]), dim=1)
            seen = torch.cat((mask, torch.ones(2, longer.shape[1] - mask.shape[1], dtype=torch.long)), dim=1)
            turns.append(generate(model, cache, longer, seen))
        assert torch.equal(*turns)


def test_an_attention_that_does_not_read_the_blocks_is_told() -> None:
    model = family_model("llama")
    ids, mask = _prompt(6)
    model.set_attn_implementation("sdpa")
    stale = copy.deepcopy(model.config)
    stale._attn_implementation = "kvq"
    with pytest.raises(ConfigError, match="model's own config"), torch.no_grad():
        model(ids, past_key_values=KvqCache(stale))
    model.set_attn_implementation("kvq")
    for cache in (None, DynamicCache(config=model.config), KvqCache(copy.deepcopy(stale))):
        if isinstance(cache, KvqCache):
            cache._state.config.text._attn_implementation = "sdpa"
        with pytest.raises(ModelError, match="KvqCache"), torch.no_grad():
            model(ids, past_key_values=cache)
    generate(model, KvqCache(model.config), ids, mask)


def test_calls_that_do_not_fit_are_refused_by_name() -> None:
    model = family_model("llama")
    model.set_attn_implementation("sdpa")
    ids, _ = _prompt(6, batch=2)
    cache = KvqCache(model.config, kv="int4")
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with pytest.raises(RequestError, match="holds 2 rows, got a batch of 1"):
            model(ids[:1], past_key_values=cache)
        row = torch.randn(2, 2, 1, 16)
        with pytest.raises(RequestError, match="must be fp32, bf16 or fp16"):
            cache.update(row.long(), row.long(), 0)
        with pytest.raises(RequestError, match="must be fp32, bf16 or fp16"):
            cache.update(row[..., :8], row, 0)
        with pytest.raises(RequestError, match="one dtype"):
            cache.update(row.half(), row.half(), 0)
        cache.update(row, row, 0)
        with pytest.raises(RequestError, match="1 of 2 layers"):
            cache.update(row, row, 0)
        with pytest.raises(RequestError, match="1 of 2 layers"):
            cache.crop(-1)
    with pytest.raises(ConfigError, match=r"cache\.crop"):
        cache.layers[0].crop(-1)


def test_configs_and_options_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = small_config("llama")
    with pytest.raises(ConfigError, match="transformers config"):
        KvqCache({"model_type": "llama"})
    with pytest.raises(ConfigError, match="bloom"):
        KvqCache(AutoConfig.for_model("bloom"))
    with pytest.raises(ConfigError, match="is_encoder_decoder"):
        KvqCache(AutoConfig.for_model("t5"))
    with pytest.raises(ConfigError, match="add_cross_attention"):
        KvqCache(small_config("gpt2", add_cross_attention=True))
    with pytest.raises(ConfigError, match="needs static scales"):
        KvqCache(config, kv="fp8_per_head")
    with pytest.raises(ConfigError, match="unknown KV format"):
        KvqCache(config, kv="int7")
    with pytest.raises(ConfigError, match=r"bf16\+sinks=4 keeps first tokens .* leave out \+sinks="):
        KvqCache(config, kv="bf16+sinks=4")
    with pytest.raises(ConfigError, match=r"residual_length=8 and int8\+recent=16 both say .* leave one out"):
        KvqCache(config, kv="int8+recent=16", residual_length=8)
    with pytest.raises(ConfigError, match="max_tokens"):
        KvqCache(config, max_tokens=0)
    with pytest.raises(ConfigError, match="unknown backend"):
        KvqCache(config, backend="cuda")
    other = tmp_path / "kvq.json"
    other.write_text(json.dumps({"format_version": 2, "layers": [], "static_scales": None}))
    with pytest.raises(ConfigError, match="at least one layer"):
        KvqCache(config, kv=str(other))


def test_the_attention_of_kvq_load_takes_no_cache(tiny: Any) -> None:
    ids, _ = _prompt(5)
    with pytest.raises(ConfigError, match=r"kvq\.load"), torch.no_grad():
        tiny.weights.model(ids, past_key_values=KvqCache(tiny.weights.model.config))


def test_static_scales_come_from_a_file_and_must_be_for_these_heads(tiny: Any) -> None:
    folder = tiny.prepared.folder
    ids = random_tokens(50, seed=0, vocab=4000)
    want = tiny.with_kv("fp8_per_head").logits(ids)
    with attention_of(tiny.weights.model, "sdpa") as model, torch.no_grad():
        cache = KvqCache(model.config, kv="fp8_per_head", scales=folder / "kvq.json")
        got = model(torch.tensor([ids]), past_key_values=cache).logits[0]
    assert (got - want).abs().max() / want.abs().max() < 1e-2
    with pytest.raises(ConfigError, match="KV heads per layer"):
        KvqCache(small_config("llama"), kv="fp8_per_head", scales=folder / "kvq.json")


def test_importing_kvq_cache_does_not_import_transformers() -> None:
    code = "import kvq.cache, sys; assert 'transformers' not in sys.modules; kvq.cache.KvqCache"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_bf16_models_get_bf16_rows() -> None:
    model = build_model(small_config("llama")).to(torch.bfloat16)
    for attention in (dense_attention_name(model), "kvq"):
        model.set_attn_implementation(attention)
        for kv in ("int4", "bf16"):
            ids, mask = left_padded([17, 8])
            cache = KvqCache(model.config, kv=kv, block_size=8)
            out = generate(model, cache, ids, mask, output_logits=True, return_dict_in_generate=True)
            assert out.logits[0].dtype in (torch.bfloat16, torch.float32)
            assert torch.isfinite(out.logits[-1]).all()


@pytest.mark.parametrize("recent", [0, 6])
@pytest.mark.parametrize("attention", ["sdpa", "kvq"])
def test_a_cache_may_be_used_in_and_out_of_inference_mode(attention: str, recent: int) -> None:
    model = family_model("llama")
    model.set_attn_implementation(attention)
    ids = torch.tensor([random_tokens(12, seed=1), random_tokens(12, seed=2)])
    cache = KvqCache(model.config, kv="int4", block_size=8, residual_length=recent)
    with torch.inference_mode():
        model(ids, past_key_values=cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        twin = copy.deepcopy(cache)
    with torch.no_grad():
        a = model(ids[:, :1], past_key_values=cache).logits
        b = model(ids[:, :1], past_key_values=twin).logits
    assert torch.equal(a, b)
    cache.crop(-3)
    with torch.inference_mode():
        model(ids[:, :2], past_key_values=cache)
    cache.check_integrity()


def test_a_dtype_that_blocks_do_not_know_is_refused_before_anything_is_stored() -> None:
    model = copy.deepcopy(family_model("llama")).double()
    model.set_attn_implementation("sdpa")
    cache = KvqCache(model.config)
    with pytest.raises(RequestError, match="must be fp32, bf16 or fp16"):
        model(torch.tensor([[1, 2]]), past_key_values=cache)


def test_crop_takes_whole_numbers_and_changes_nothing_otherwise() -> None:
    model = family_model("llama")
    model.set_attn_implementation("sdpa")
    cache = KvqCache(model.config)
    with torch.inference_mode():
        model(torch.tensor([[1, 2, 3]]), past_key_values=cache)
    with pytest.raises(RequestError, match="crop takes 0 to minus"):
        cache.crop(-1.0)
    assert cache.get_seq_length() == 3
    cache.crop(-1)
    assert cache.get_seq_length() == 2
