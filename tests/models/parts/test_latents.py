"""Models with latent attention store one latent and one rotary key a token, for all heads."""

import logging
from typing import Any

import pytest
import torch

import kvq
from kvq.cache.stores import latent
from kvq.engine.steps.reconcile import found_weights
from kvq.errors import ModelError
from kvq.geometry import parse_geometry
from kvq.models import load
from kvq.models.describe.modules import config_of
from kvq.models.loading.footprint import planned_weights
from kvq.models.loading.prepared import prepare
from kvq.models.observe.geometry import observe, observed_geometry
from kvq.models.observe.tiny_copy import build_tiny_copy
from kvq.models.parts.latents import attach_expansions
from kvq.models.prove.probe import relative_error
from kvq.sizing.memory import LINEAR_TERM
from tests.engine.kit import engine, mixed_prompts, pair, tokens_of
from tests.helpers_models import eager_logits, load_eager, random_tokens, save_model
from tests.models.test_families import check_against_transformers
from tools.model_table import GIVEN

LATENT, ROTARY, HEADS = 16, 8, 4
WHOLE_PANELS = {
    "q_lora_rank": 32,
    "v_head_dim": 16,
    "qk_rope_head_dim": 16,
    "head_dim": 16,
}  # of 16 outputs, nothing padded
FAMILIES = ("axk1", "deepseek_v2", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu")  # on no list


@pytest.fixture
def folder(tmp_path: Any) -> Any:
    return save_model(tmp_path, "deepseek_v3", first_k_dense_replace=2)


def twin_config(name: str) -> dict[str, Any]:
    found: dict[str, Any] = config_of({"model_type": name, **GIVEN.get(name, {})}).to_dict()
    return found


@pytest.mark.parametrize("name", ["longcat_flash", "deepseek_v2"])
def test_latents_of_families_on_no_list_equal_transformers(name: str, tmp_path: Any) -> None:
    build_tiny_copy(twin_config(name)).save_pretrained(tmp_path)
    check_against_transformers(tmp_path, decoded=12)


@pytest.mark.parametrize("name", FAMILIES)
def test_latents_are_seen_without_numbers(name: str, tmp_path: Any) -> None:
    geometry = observed_geometry(twin_config(name), tmp_path)
    for layer in geometry.layers:
        assert layer.is_latent
        assert (layer.kv_heads, layer.expansion is None) == (1, False)
    assert geometry.expanded().layers[0].kv_heads == geometry.q_heads


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "phi3", "gpt2", "qwen3"])
def test_models_without_latents_show_none(name: str, tmp_path: Any) -> None:
    model = load_eager(save_model(tmp_path, name))
    assert not any(layer.is_latent for layer in observe(model).layers)


def test_keys_that_hold_other_numbers_are_stored_per_head(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    """As of a model that turns all of a key: V lies where latents put it, K holds something else."""
    from transformers.models.minicpm3.modeling_minicpm3 import MiniCPM3Attention

    whole = MiniCPM3Attention.expand_kv
    monkeypatch.setattr(
        MiniCPM3Attention, "expand_kv", lambda self, *x: (whole(self, *x)[0] * 1.5, whole(self, *x)[1])
    )
    caplog.set_level(logging.WARNING, "kvq")
    geometry = observed_geometry(twin_config("minicpm3"), tmp_path)
    assert not any(layer.is_latent for layer in geometry.layers)
    assert "K and V of every head are stored" in caplog.text


def test_bytes_a_token_are_those_of_the_formula_and_allocated(folder: Any) -> None:
    for kv, bits in (("fp32", 32), ("bf16", 16), ("int4_g8", 4 + 4)):
        model = load(folder, kv, dtype="fp32", block_size=16)
        each = 2 * (LATENT + ROTARY) * bits // 8
        assert model.kv_bytes_per_token == each
        session = model.session(max_tokens=160)
        assert session.cache.nbytes == each * 160
    expanded_bytes = 2 * HEADS * (24 + 12) * 4
    assert load(folder, "fp32", dtype="fp32", cache="dense").kv_bytes_per_token == expanded_bytes


@pytest.mark.parametrize("backend", ["auto", "reference"])  # packed, and as it was
def test_weights_take_the_bytes_that_were_planned(backend: str, tmp_path: Any) -> None:
    folder = save_model(tmp_path, "deepseek_v3", first_k_dense_replace=2, **WHOLE_PANELS)
    model = load(folder, "fp32", dtype="fp32", backend=backend)
    planned = {term.name: term.nbytes for term in planned_weights(model.prepared)}
    found = found_weights(model.weights.model)
    assert found[LINEAR_TERM] == planned[LINEAR_TERM]


@pytest.mark.parametrize(
    "kv", ["int8", "fp8", "int4_g8", "int4_g8_rot", "int8+sinks=16+recent=16", "int4_g8_mean+recent=16"]
)
def test_formats_of_latents_stay_close(kv: str, folder: Any) -> None:
    ids = random_tokens(60, seed=2)
    want = eager_logits(load_eager(folder), ids)
    found = load(folder, kv, dtype="fp32", block_size=16).logits(ids, chunk=23)
    assert 1e-5 < relative_error(found, want) < 0.2


@pytest.mark.parametrize("kv", ["fp32", "int8"])
def test_long_prefills_multiply_latents_out_and_give_the_same(
    kv: str, folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folder, kv, dtype="fp32", block_size=16)
    ids = random_tokens(250, seed=4)
    monkeypatch.setattr(latent, "pays", lambda *_: False)
    want = model.logits(ids, chunk=200)
    calls = []
    whole = latent._over_heads
    monkeypatch.setattr(latent, "_over_heads", lambda *x: calls.append(x) or whole(*x))
    monkeypatch.setattr(latent, "pays", lambda new, *_: new > 100)
    monkeypatch.setattr(latent, "SCRATCH_BYTES", 1)  # chunks of the smallest size
    monkeypatch.setattr(latent, "_STEP", 64)
    found = model.logits(ids, chunk=200)
    assert len(calls) == 2  # layers, of the first chunk alone
    assert relative_error(found, want) < (1e-5 if kv == "fp32" else 1e-3)


def test_a_long_prefill_beside_decodes_is_expanded_alone(
    folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folder, "fp32", dtype="fp32", block_size=16)
    prompts = [random_tokens(n, seed=n) for n in (5, 120, 9)]
    want = [model.logits(ids) for ids in prompts]
    monkeypatch.setattr(latent, "pays", lambda new, *_: new > 100)
    session = model.session(max_tokens=120, max_sequences=3)
    work = [(session.new_sequence(), ids) for ids in prompts]
    for result, logits in zip(session.forward(work, all_rows=True), want, strict=True):
        assert relative_error(result.logits, logits) < 1e-5


def test_expanding_pays_for_many_tokens_only(folder: Any) -> None:
    v3 = parse_geometry({"model_type": "deepseek_v3"}).layers[0]
    assert not latent.pays(1, 8192, v3, 1.3)
    assert not latent.pays(latent.LEAST_NEW - 1, 100, v3, 0.1)
    assert latent.pays(2048, 2048, v3, 1.3)
    assert not latent.pays(2048, 2048, v3, 3.5)  # where the absorbed kernel has tiles


def test_the_observer_sees_rotary_keys_and_latents(folder: Any) -> None:
    session = load(folder, "fp32", dtype="fp32").session(max_tokens=10)
    seen: list[tuple[Any, Any]] = []
    session.observer = lambda layer, k, v: seen.append((tuple(k.shape), tuple(v.shape)))
    session.forward([(session.new_sequence(), random_tokens(10, seed=1))])
    assert seen == [((10, 1, ROTARY), (10, 1, LATENT))] * 2


@pytest.mark.parametrize("weights", ["int8", "int4_g8"])
def test_quantized_projections_are_absorbed_with_their_numbers(weights: str, folder: Any) -> None:
    model = load(folder, "fp32", dtype="fp32", weights=weights)
    assert model.geometry.layers[0].is_latent
    assert torch.isfinite(model.logits(random_tokens(20, seed=3))).all()


@pytest.mark.parametrize("kv", ["fp32", "int4_g8", "int8+sinks=16+recent=16"])
def test_the_engine_swaps_and_reuses_latents(kv: str) -> None:
    model, prompts = pair("deepseek_v3")[0], mixed_prompts(8, seed=3, longest=60)
    params = kvq.SamplingParams(max_tokens=10, ignore_eos=True)
    tight = {"num_blocks": 14, "kv_host": "4MiB"} if "recent" not in kv else {}
    alone = [tokens_of(engine(model, kv, max_num_seqs=1).generate([x], params))[0] for x in prompts]
    llm = engine(model, kv, **tight)
    together = tokens_of(llm.generate(prompts, params))
    again = tokens_of(llm.generate(prompts, params))  # from cached prefixes
    assert together == again == alone


def test_a_layer_without_its_projection_is_told(folder: Any) -> None:
    prepared = prepare(folder)
    model = load_eager(folder)
    model.model.layers[1].self_attn.kv_b_proj = torch.nn.Identity()
    with pytest.raises(ModelError, match="layer 1 has no Linear layer for its latents"):
        attach_expansions(model, prepared.geometry, torch.float32)
