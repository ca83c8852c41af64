"""Geometry read from a config.json's dict equals geometry read from the live transformers config."""

import json
from inspect import getmodule, getsource
from typing import Any

import pytest
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from kvq.errors import ConfigError
from kvq.geometry import FAMILIES, LayerGeometry, ModelGeometry, parse_geometry
from tests.geometry.live import live_geometry
from tests.helpers_models import FAMILY_OPTIONS, small_config

# Families whose config class reads a null num_key_value_heads as one KV head per query head.
NULLABLE = (
    "arcee", "cohere", "cohere2", "glm", "granite", "llama", "olmo", "olmo2", "olmo3", "phi", "phi3",
    "qwen2", "qwen3", "seed_oss", "smollm3",
)  # fmt: skip
GQA = sorted(name for name in FAMILIES if name not in ("gpt2", "gpt_neox", "deepseek_v3"))
SMALL = {
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "hidden_size": 96,
    "vocab_size": 77,
}
FULL, SLIDING = "full_attention", "sliding_attention"
MIXED = [SLIDING, FULL, FULL, SLIDING, SLIDING]

# Options of a family, given to its config class and, as they are, to the parser.
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {**SMALL, "num_key_value_heads": 3}) for name in GQA),
    *((name, {**SMALL, "num_key_value_heads": None}) for name in NULLABLE),
    *((name, {**SMALL, "max_position_embeddings": 123}) for name in GQA),
    *(
        (name, {**SMALL, "head_dim": 20})
        for name in GQA
        if name not in ("cohere", "granite", "olmo", "olmo2", "olmo3", "phi", "phi3", "starcoder2")
    ),
    *(
        (name, {**SMALL, "layer_types": MIXED, "sliding_window": 7})
        for name in ("cohere2", "exaone4", "gemma2", "gemma3_text", "gpt_oss", "ministral", "olmo3")
    ),
    *(
        (name, {**SMALL, "sliding_window": 7})
        for name in (
            "cohere2", "exaone4", "gemma2", "gemma3_text", "gpt_oss", "ministral", "mistral", "mixtral",
            "olmo3", "phi3", "qwen2", "qwen3", "qwen3_moe", "starcoder2",
        )
    ),
    *(
        (name, {**SMALL, "sliding_window": None})
        for name in (
            "cohere2", "ministral", "mistral", "mixtral", "olmo3", "phi3", "qwen2", "qwen3", "qwen3_moe",
            "starcoder2",
        )
    ),
    *(
        (name, {**SMALL, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": upper})
        for name in ("qwen2", "qwen3", "qwen3_moe")
        for upper in (0, 2, 5, 28)
    ),
    *((name, {**SMALL, "use_sliding_window": True}) for name in ("qwen2", "qwen3", "qwen3_moe")),
    *(
        (name, {**SMALL, "sliding_window": 7, "sliding_window_pattern": 3})
        for name in ("cohere2", "exaone4", "gemma2", "gemma3_text", "gpt_oss", "olmo3")
    ),
    *(
        (name, {**SMALL, "use_sliding_window": True, "sliding_window": 9, "layer_types": MIXED})
        for name in ("qwen2", "qwen3", "smollm3")
    ),
    ("gemma2", {**SMALL, "attn_logit_softcapping": None}),
    ("gemma2", {**SMALL, "attn_logit_softcapping": 12.5}),
    ("gpt2", {"n_layer": 3, "n_head": 5, "n_embd": 80, "n_positions": 99, "vocab_size": 61}),
    ("gpt_neox", {**SMALL, "num_key_value_heads": None, "max_position_embeddings": 55}),
    ("deepseek_v3", {**SMALL, "qk_nope_head_dim": 20, "qk_rope_head_dim": 6, "v_head_dim": 11}),
    ("deepseek_v3", {**SMALL, "n_group": 1}),
]  # fmt: skip


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_an_empty_config_means_the_defaults_of_its_class(family):
    assert parse_geometry({"model_type": family}) == live_geometry(AutoConfig.for_model(family))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_full_config_of_defaults_is_read_alike(family):
    config = AutoConfig.for_model(family)
    assert parse_geometry(config.to_dict()) == live_geometry(config)


@pytest.mark.parametrize(("family", "options"), CASES, ids=[f"{f}-{'-'.join(o)}" for f, o in CASES])
def test_other_configs_are_read_alike_written_out_or_not(family, options):
    config = AutoConfig.for_model(family, **options)
    live = live_geometry(config)
    assert parse_geometry(config.to_dict()) == live
    assert parse_geometry({"model_type": family, **options}) == live


@pytest.mark.parametrize("family", sorted(FAMILY_OPTIONS))
def test_a_saved_config_is_read_alike(family, tmp_path):
    config = small_config(family)
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert parse_geometry(written) == live_geometry(AutoConfig.from_pretrained(tmp_path))
    assert parse_geometry(written) == live_geometry(config)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_windows_are_read_where_the_familys_code_reads_them(family):
    """A family's code in transformers has windows, or whatever config.json says of them is nothing."""
    has_windows = "sliding_window" in getsource(
        getmodule(MODEL_FOR_CAUSAL_LM_MAPPING[type(small_config(family))])
    )
    assert (FAMILIES[family].window_rule != "never") == has_windows
    named = {
        "sliding_window": 7,
        "use_sliding_window": True,
        "layer_types": MIXED,
        "sliding_window_pattern": 2,
    }
    layers = parse_geometry({"model_type": family, **SMALL, "n_layer": 5, **named}).layers
    assert any(layer.window for layer in layers) == has_windows


def test_numbers_of_a_known_model_come_out_as_published():
    """Gemma 2 9B: 42 layers, every second one sliding, 8 KV heads of 256."""
    geometry = parse_geometry(
        {
            "model_type": "gemma2",
            "num_hidden_layers": 42,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "hidden_size": 3584,
        }
    )
    assert [layer.window for layer in geometry.layers] == [4096, None] * 21
    assert geometry.softcap == 50.0
    assert geometry.elements_per_token == 42 * 8 * (256 + 256)


def test_latent_attention_stores_576_elements_for_all_heads():
    geometry = parse_geometry({"model_type": "deepseek_v3"})
    assert set(geometry.head_dims) == {(64, 512)}
    assert set(geometry.kv_heads) == {1}
    assert geometry.layers[0].elements_per_token == 576
    expanded = geometry.expanded()
    assert set(expanded.head_dims) == {(192, 128)}
    assert set(expanded.kv_heads) == {128}
    assert expanded.expanded() == expanded


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive number, got 0"),
        ({"num_hidden_layers": -3}, "num_hidden_layers must be a positive number, got -3"),
        ({"num_hidden_layers": "12"}, "num_hidden_layers must be a positive number, got '12'"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers must be a positive number, got 2.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a positive number, got True"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive number, got 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be a positive number, got 0"),
        ({"num_key_value_heads": 5}, "32 query heads don't divide evenly among 5 KV heads"),
        ({"head_dim": -64}, "head_dim must be a positive number, got -64"),
        ({"hidden_size": [4096]}, r"hidden_size must be a positive number, got \[4096\]"),
        ({"vocab_size": "many"}, "vocab_size must be a positive number, got 'many'"),
        ({"max_position_embeddings": -1}, "max_position_embeddings must be a positive number, got -1"),
        ({"max_position_embeddings": 2**62}, "max_position_embeddings may be up to 1073741824, got 46116860"),
    ],
)
def test_bad_numbers_are_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        parse_geometry({"model_type": "llama", **options})


@pytest.mark.parametrize(
    ("family", "options", "key"),
    [
        ("gpt2", {"n_layer": 0}, "n_layer"),
        ("gpt2", {"n_head": "x"}, "n_head"),
        ("deepseek_v3", {"qk_rope_head_dim": 0}, "qk_rope_head_dim"),
        ("deepseek_v3", {"v_head_dim": None, "qk_nope_head_dim": -1}, "qk_nope_head_dim"),
        ("mistral", {"sliding_window": -5}, "window"),
        ("mistral", {"sliding_window": "wide"}, "sliding_window"),
        ("mistral", {"sliding_window": [16]}, "sliding_window"),
        ("gemma2", {"attn_logit_softcapping": "soft"}, "attn_logit_softcapping"),
        ("gemma2", {"attn_logit_softcapping": [1]}, "attn_logit_softcapping"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping"),
        ("exaone4", {"sliding_window_pattern": -4}, "sliding_window_pattern"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": "all"}, "max_window_layers"),
        ("llama", {"hidden_size": 16, "num_attention_heads": 32}, "head"),
        (
            "qwen3",
            {"num_hidden_layers": 2, "layer_types": [FULL, "chunked_attention"]},
            "layer kind 'chunked_attention' is not one kvq can run; it runs full_attention, sliding_",
        ),
        ("qwen3", {"num_hidden_layers": 2, "layer_types": [FULL]}, "layer_types must list 2 layers"),
        ("qwen3", {"num_hidden_layers": 2, "layer_types": FULL}, "layer_types must list 2 layers"),
        ("qwen3", {"num_hidden_layers": 1, "layer_types": [None]}, "layer kind None"),
    ],
)
def test_bad_numbers_of_one_family_are_refused_by_name(family, options, key):
    with pytest.raises(ConfigError, match=key):
        parse_geometry({"model_type": family, **options})


def test_an_unknown_family_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"'lama' is not a family .* did you mean 'llama'\?"):
        parse_geometry({"model_type": "lama"})
    with pytest.raises(ConfigError, match="it knows arcee, cohere"):
        parse_geometry({})


@pytest.mark.parametrize(
    ("windows", "names"),
    [
        ([None, None], ["full"]),
        ([16, 16, 16], ["sliding-16"]),
        ([16, None, 128, 16, None, 64], ["full", "sliding-128", "sliding-64", "sliding-16"]),
        ([1, 2, 3], ["sliding-3", "sliding-2", "sliding-1"]),
    ],
)
def test_groups_are_full_first_then_by_falling_window_with_every_layer_in_one(windows, names):
    layers = tuple(
        LayerGeometry(index=i, kv_heads=2, k_head_dim=8, v_head_dim=8, window=window)
        for i, window in enumerate(windows)
    )
    geometry = ModelGeometry(
        model_type="llama", layers=layers, q_heads=4, hidden_size=32, vocab_size=50, max_context=64
    )
    groups = geometry.groups()
    assert [group.name for group in groups] == names
    assert [group.index for group in groups] == list(range(len(names)))
    assert sorted(layer.index for group in groups for layer in group.layers) == list(range(len(windows)))
    assert all(layer.window == group.window for group in groups for layer in group.layers)
    assert all(list(g.layers) == sorted(g.layers, key=lambda layer: layer.index) for g in groups)


@pytest.mark.parametrize(
    "changes", [{"kv_heads": 0}, {"k_head_dim": -1}, {"v_head_dim": 0}, {"window": 0}, {"window": -16}]
)
def test_a_layer_of_impossible_numbers_is_refused(changes):
    with pytest.raises(ConfigError, match=f"layer 3: {next(iter(changes))} must be positive"):
        LayerGeometry(**{"index": 3, "kv_heads": 1, "k_head_dim": 8, "v_head_dim": 8} | changes)


def test_a_model_without_attention_layers_is_refused():
    with pytest.raises(ConfigError, match="at least one attention layer"):
        ModelGeometry(model_type="llama", layers=(), q_heads=4, hidden_size=32, vocab_size=50, max_context=64)
