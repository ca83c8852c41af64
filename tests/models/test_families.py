"""Every family computes over kvq's blocks what transformers' own eager attention computes."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvq.errors import ModelError
from kvq.geometry import FAMILIES
from kvq.models.prove.probe import relative_error
from tests.helpers_models import (
    FAMILY_OPTIONS,
    VOCAB,
    WINDOW,
    WINDOWED,
    Decoded,
    build_model,
    eager_greedy,
    eager_logits,
    load_eager,
    load_fp32,
    random_tokens,
    run_step,
    save_model,
    small_config,
)

TOLERANCE = 1e-5  # max|a - b| / max|b|
DECODED = 64  # tokens

# Options that change what attention computes, beyond the ones in FAMILY_OPTIONS.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}),
    (
        "llama",
        {
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("gpt2", {"scale_attn_weights": False}),
    ("mistral", {"sliding_window": None}),
    ("mixtral", {"sliding_window": None}),
    ("phi", {"qk_layernorm": True, "num_key_value_heads": 4}),
    ("phi3", {"sliding_window": None, "partial_rotary_factor": 0.5}),
    ("qwen2", {"use_sliding_window": False}),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("deepseek_v3", {"q_lora_rank": None, "rope_interleave": False, "v_head_dim": 32}),
    ("deepseek_v3", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": WINDOW, "num_hidden_layers": 3}),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention", "full_attention"]}),
]


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt2", "llama", "seed_oss"])
def test_windows_that_only_a_config_has_are_none(family, tmp_path):
    named = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
    folder = save_model(tmp_path, family, **named)
    ids = random_tokens(5 * WINDOW, seed=1)
    assert json.loads((folder / "config.json").read_text())["sliding_window"] == WINDOW
    assert relative_error(load_fp32(folder).logits(ids), eager_logits(load_eager(folder), ids)) <= TOLERANCE


@pytest.mark.parametrize("window", [WINDOW, 100_000])
def test_a_window_that_the_code_does_not_have_is_found_however_long_it_is(window, tmp_path, monkeypatch):
    wrong = replace(FAMILIES["llama"], window_rule="uniform")
    monkeypatch.setitem(FAMILIES, "llama", wrong)
    folder = save_model(tmp_path, "llama", sliding_window=window)
    with pytest.raises(ModelError, match=r"config\.json says of windows \(sliding_window\): .* differs"):
        load_fp32(folder)


def test_kinds_of_layers_without_a_window_to_them_are_refused_in_words(tmp_path):
    folder = save_model(tmp_path, "qwen3")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "use_sliding_window": False}))
    with pytest.raises(ModelError, match=r"no small one can be made to check it .*sliding_window"):
        load_fp32(folder)


def test_every_family_that_kvq_accepts_is_tested_here():
    assert set(FAMILY_OPTIONS) == set(FAMILIES)


@pytest.mark.daily(12)
@pytest.mark.parametrize("family", sorted(FAMILY_OPTIONS))
def test_prefill_and_64_decoded_tokens_equal_transformers_alone_and_packed(family, tmp_path):
    check_against_transformers(save_model(tmp_path, family), decoded=DECODED)


@pytest.mark.parametrize(("family", "options"), VARIANTS, ids=[f"{f}-{'-'.join(o)}" for f, o in VARIANTS])
def test_options_within_a_family_equal_transformers(family, options, tmp_path):
    check_against_transformers(save_model(tmp_path, family, **options), decoded=24)


# Every head dimension and every count of KV heads, each with an odd partner.
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "q_heads"),
    [(48, 1, 3), (60, 3, 6), (64, 2, 2), (80, 8, 8), (96, 3, 3), (128, 1, 4), (256, 2, 4), (60, 8, 16)],
)
def test_head_dimensions_and_kv_head_counts_equal_transformers(family, head_dim, kv_heads, q_heads, tmp_path):
    folder = save_model(
        tmp_path,
        family,
        hidden_size=48,
        head_dim=head_dim,
        num_key_value_heads=kv_heads,
        num_attention_heads=q_heads,
        initializer_range=0.1,
    )
    check_against_transformers(folder, decoded=20)


def check_against_transformers(folder: Any, *, decoded: int) -> None:
    """Alone and packed, prefill and decode: logits within TOLERANCE, greedy tokens the same."""
    reference = load_eager(folder)
    prompt = random_tokens(45, seed=1)
    want, want_tokens = eager_greedy(reference, prompt, decoded)
    model = load_fp32(folder, block_size=8)

    alone = Decoded(session := model.session(max_tokens=45 + decoded), prompt)
    for _ in range(decoded + 1):
        run_step(session, [alone])
    assert relative_error(alone.logits, want) <= TOLERANCE
    assert alone.tokens == want_tokens

    rows = run_packed(model, prompt, decoded)
    assert relative_error(rows[0].logits, want) <= TOLERANCE
    assert rows[0].tokens == want_tokens
    for neighbour in rows[1:]:
        assert relative_error(neighbour.logits, eager_logits(reference, neighbour.fed)) <= TOLERANCE


def run_packed(model: Any, prompt: list[int], decoded: int) -> list[Decoded]:
    """The prompt among others: prefilled in one piece or in chunks, while neighbours decode."""
    session = model.session(max_tokens=len(prompt) + decoded, max_sequences=3)
    first = Decoded(session, prompt, chunks=[20])
    long = Decoded(session, random_tokens(61, seed=2), chunks=[7, 1, 30])
    late = Decoded(session, random_tokens(3, seed=3))
    for step in range(decoded + 2):
        rows = [first]
        if step < 8:
            rows.insert(0, long)
        if 5 <= step < 12:
            rows.append(late)
        run_step(session, rows)
    return [first, long, late]


# What each family would lose if kvq, or these tests, were blind to it.


@pytest.mark.parametrize("family", WINDOWED)
def test_the_comparison_sees_a_window_one_token_longer(family, tmp_path):
    folder = save_model(tmp_path, family)
    prompt = random_tokens(45, seed=1)
    right = eager_logits(load_eager(folder), prompt)
    wrong = eager_logits(load_eager(folder, sliding_window=WINDOW + 1), prompt)
    assert relative_error(wrong, right) > 100 * TOLERANCE


def _larger_scale(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.scaling *= 1.05


def _no_softcap(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "attn_logit_softcapping"):
            module.attn_logit_softcapping = None


def _no_sinks(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data.fill_(-1e9)


def _no_query_bias(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.bias", "query_key_value.bias")):
            parameter.data.zero_()


@pytest.mark.parametrize(
    ("family", "spoil"),
    [
        *((family, _larger_scale) for family in sorted(FAMILY_OPTIONS)),
        ("gemma2", _no_softcap),
        ("gpt_oss", _no_sinks),
        ("qwen2", _no_query_bias),
        ("gpt_neox", _no_query_bias),
    ],
)
def test_the_comparison_sees_scale_softcap_sinks_and_biases(
    family: str, spoil: Callable[[Any], None], tmp_path
):
    reference = load_eager(save_model(tmp_path, family))
    prompt = random_tokens(45, seed=1)
    right = eager_logits(reference, prompt)
    spoil(reference)
    assert relative_error(eager_logits(reference, prompt), right) > 100 * TOLERANCE


@pytest.mark.parametrize("family", sorted(FAMILY_OPTIONS))
def test_attention_of_the_test_models_is_far_from_uniform(family):
    """A model whose tokens hardly attend to anything would pass with attention left out."""
    model = build_model(small_config(family))
    model.set_attn_implementation("eager")
    ids = torch.tensor([random_tokens(45, seed=1)])
    with torch.inference_mode():
        weights = model(input_ids=ids, use_cache=False, output_attentions=True).attentions
    last_rows = torch.stack([layer[0, :, -1] for layer in weights])  # [layers, heads, keys]
    peaks = last_rows.amax(dim=-1) * (last_rows > 0).sum(dim=-1)  # 1 where uniform
    assert float(peaks.mean()) > 2.5


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("gpt_neox", {"num_key_value_heads": 2}, "layer 0: .* kv_heads=4, its config says 2"),
        ("gemma3_text", {"attn_logit_softcapping": 2.0}, "layer 0: .* softcap=None, its config says 2.0"),
        (
            "smollm3",  # without use_sliding_window
            {"sliding_window": WINDOW, "layer_types": ["full_attention", "sliding_attention"]},
            "layer 1: .* window=None, its config says 16",
        ),
    ],
)
def test_numbers_that_the_model_code_does_not_follow_are_refused(family, options, reason, tmp_path):
    folder = save_model(tmp_path, family, **options)
    with pytest.raises(ModelError, match=f"{family} {reason}"):
        load_fp32(folder)


def test_token_ids_stay_inside_the_vocabulary():
    assert max(random_tokens(1000, seed=0)) < VOCAB
