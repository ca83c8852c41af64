"""Models that kvq would run wrongly are refused by name; pinning makes longrope and dynamic RoPE safe."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from kvq.errors import ConfigError, ModelError
from kvq.models import load
from kvq.models.observe.support import check_supported
from kvq.models.prove.probe import relative_error
from tests.helpers_models import (
    Decoded,
    eager_logits,
    load_eager,
    load_fp32,
    random_tokens,
    run_step,
    save_model,
    small_config,
)

TOLERANCE = 1e-5
ORIGINAL = 32  # tokens that the longrope model was trained on first
LONGEST = 128  # tokens
_HALF = 8  # half of head_dim 16
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(_HALF)],
    "long_factor": [1.5 + 0.7 * i for i in range(_HALF)],
    "original_max_position_embeddings": ORIGINAL,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


def config_dict(model_type: str, **changes: Any) -> dict[str, Any]:
    return AutoConfig.for_model(model_type, **changes).to_dict()


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "indexer": (config_dict("glm_moe_dsa"), "glm_moe_dsa", r"an indexer \(GlmMoeDsaIndexer\)"),
    "drafter": (
        {"model_type": "gemma4_assistant"},
        "gemma4_assistant",
        "another model, whose K and V it reads",
    ),
    "bert": (config_dict("bert"), "bert", "it is an encoder"),
    "bloom": (config_dict("bloom"), "bloom", "ALiBi"),
    "mpt": (config_dict("mpt"), "mpt", "ALiBi"),
    "falcon": (config_dict("falcon", alibi=True), "falcon", "ALiBi"),
    "alibi on a known family": ({"model_type": "llama", "alibi": True}, "llama", "ALiBi"),
    "t5": (config_dict("t5"), "t5", "cross-attention"),
    "encoder and decoder": ({"model_type": "llama", "is_encoder_decoder": True}, "llama", "cross-attention"),
    "bidirectional gemma3": (
        small_config("gemma3_text", use_bidirectional_attention=True).to_dict(),
        "gemma3_text",
        "not causal",
    ),
    "several models": (
        config_dict("paligemma"),
        "paligemma",
        r"several models \(text_config, vision_config\)",
    ),
    "not causal": ({"model_type": "qwen2", "is_causal": False}, "qwen2", "not causal"),
    "gpt2 upcast": ({"model_type": "gpt2", "reorder_and_upcast_attn": True}, "gpt2", "bypasses"),
    "mamba": (config_dict("mamba"), "mamba", "no KV cache"),
    "unknown": ({"model_type": "quantum_llama"}, "quantum_llama", "not among the families"),
    "nameless": ({}, "this model", "not among the families"),
    "auto_map": (
        {"model_type": "llama", "auto_map": {"AutoModelForCausalLM": "modeling.Evil"}},
        "llama",
        "auto_map",
    ),
    "longrope": (
        small_config("phi3", rope_parameters=LONGROPE).to_dict(),
        "phi3",
        r"longrope RoPE .*load\(max_context=N\)",
    ),
    "longrope by its old name": (
        {"model_type": "phi3", "rope_scaling": {"type": "su", "long_factor": [], "short_factor": []}},
        "phi3",
        "longrope RoPE",
    ),
    "dynamic": (
        small_config("llama", rope_parameters=DYNAMIC).to_dict(),
        "llama",
        r"dynamic RoPE .*load\(max_context=N\)",
    ),
    "longrope for one kind of layer": (
        {"model_type": "gemma3_text", "rope_parameters": {"full_attention": LONGROPE}},
        "gemma3_text",
        "longrope RoPE",
    ),
    "chunked layers": (
        {"model_type": "qwen3", "num_hidden_layers": 1, "layer_types": ["chunked_attention"]},
        "qwen3",
        "chunked_attention",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_would_run_wrongly_are_refused_with_name_and_reason(case, tmp_path):
    config, name, reason = REFUSED[case]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"kvq does not run {name}: .*{reason}"):
        load(tmp_path)


def test_a_refused_model_is_refused_before_its_weights_are_looked_for(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bloom"}))
    with pytest.raises(ModelError, match="ALiBi"):
        load(tmp_path)


def test_a_pinned_context_lifts_the_refusal_of_rope_and_no_other():
    longrope = small_config("phi3", rope_parameters=LONGROPE).to_dict()
    assert check_supported(longrope, max_context=ORIGINAL, folder=Path()).model_type == "phi3"
    with pytest.raises(ModelError, match="auto_map"):
        check_supported(longrope | {"auto_map": {"AutoConfig": "x.Y"}}, max_context=ORIGINAL, folder=Path())


@pytest.fixture(scope="module")
def longrope_folder(tmp_path_factory):
    return save_model(
        tmp_path_factory.mktemp("longrope"),
        "phi3",
        sliding_window=None,
        rope_parameters=LONGROPE,
        original_max_position_embeddings=ORIGINAL,  # Phi-3 reads this one, not the one beside the factors
        max_position_embeddings=LONGEST,
    )


@pytest.mark.parametrize(
    ("max_context", "length"), [(ORIGINAL, ORIGINAL), (ORIGINAL, 9), (ORIGINAL + 1, 33), (LONGEST, 50)]
)
def test_pinned_longrope_equals_transformers_for_the_lengths_it_was_pinned_for(
    longrope_folder, max_context, length
):
    ids = random_tokens(length, seed=1)
    pinned = load_fp32(longrope_folder, max_context=max_context)
    # A new reference each time: transformers keeps the frequencies of what it last ran.
    want = eager_logits(load_eager(longrope_folder), ids)
    assert relative_error(pinned.logits(ids), want) <= TOLERANCE


def test_short_and_long_factors_give_different_models(longrope_folder):
    ids = random_tokens(20, seed=1)
    short = load_fp32(longrope_folder, max_context=ORIGINAL).logits(ids)
    long = load_fp32(longrope_folder, max_context=LONGEST).logits(ids)
    assert relative_error(short, long) > 100 * TOLERANCE


def test_pinned_dynamic_rope_equals_transformers_at_that_length(tmp_path):
    folder = save_model(tmp_path, "llama", rope_parameters=DYNAMIC, max_position_embeddings=24)
    ids = random_tokens(60, seed=1)
    want = eager_logits(load_eager(folder), ids)
    assert relative_error(load_fp32(folder, max_context=60).logits(ids), want) <= TOLERANCE
    assert relative_error(load_fp32(folder, max_context=24).logits(ids[:24]), want[:24]) > 100 * TOLERANCE


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_pinned_token_does_not_change_with_batch_neighbours_of_other_lengths(
    kind, longrope_folder, tmp_path
):
    """Unpinned, a neighbour beyond the original length would switch everybody's frequencies."""
    folder = longrope_folder
    if kind == "dynamic":
        folder = save_model(tmp_path, "llama", rope_parameters=DYNAMIC, max_position_embeddings=24)
    model = load_fp32(folder, max_context=100)
    ids = random_tokens(10, seed=1)
    alone = model.logits(ids)
    for length in (3, 31, 40, 100):
        session = model.session(max_tokens=100, max_sequences=2)
        rows = [Decoded(session, ids), Decoded(session, random_tokens(length, seed=2))]
        run_step(session, rows)
        assert relative_error(rows[0].logits, alone) <= 1e-6
    again = model.logits(ids)
    assert torch.equal(again, alone)


@pytest.mark.parametrize("max_context", [0, -1, LONGEST + 1, 10**9])
def test_a_context_beyond_the_models_is_refused(longrope_folder, max_context):
    with pytest.raises(ConfigError, match=rf"{max_context} tokens .* takes 1 to {LONGEST}"):
        load_fp32(longrope_folder, max_context=max_context)


@pytest.mark.parametrize("family", ["llama", "phi", "gpt_neox"])
def test_dynamic_rope_is_refused_in_every_family_that_takes_it(family, tmp_path):
    folder = save_model(tmp_path, family, rope_parameters=DYNAMIC)
    with pytest.raises(ModelError, match=f"kvq does not run {family}: dynamic RoPE"):
        load_fp32(folder)


def test_an_option_of_load_that_is_none_is_refused_with_the_nearest_and_all() -> None:
    with pytest.raises(
        ConfigError, match=r"'bloc_size'; did you mean 'block_size'\? known: activations, backend, .*weights"
    ):
        load("tiny", bloc_size=16)  # type: ignore[call-arg]
