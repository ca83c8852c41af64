"""Scales of K and V that a checkpoint brings are the static ones of formats that take such."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvq.errors import ConfigError
from kvq.models import load
from tests.helpers_models import random_tokens, save_model

K, V = 0.02, 0.05
OWN = "model.layers.{}.self_attn."
SPELLINGS = [  # of K's and of V's
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
]


def with_scales(folder, scales):
    """A random model of two layers and two KV heads, with more tensors."""
    save_model(folder, "llama")
    path = folder / "model.safetensors"
    named = {
        OWN.format(layer) + name: torch.tensor(value) for layer in (0, 1) for name, value in scales.items()
    }
    save_file(load_file(path) | named, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("names", SPELLINGS)
def test_every_spelling_of_one_scale_a_layer_is_used(names, tmp_path, caplog):
    folder = with_scales(tmp_path, dict(zip(names, ([K], V), strict=True)))
    model = load(folder, "fp8_per_head")
    for layer, own in zip(model.recipe.layers, model.recipe.static_scales.layers, strict=True):
        assert own.scales("k", layer.k) == pytest.approx((K, K), rel=1e-6)
        assert own.scales("v", layer.v) == pytest.approx((V, V), rel=1e-6)
    assert f"brings scales of K and V (model.layers.0.self_attn.{names[0]})" in caplog.text
    ids = random_tokens(40, seed=1)
    away = model.logits(ids) - load(folder, "fp32").logits(ids)
    assert 0 < float(away.abs().max()) < 1


def test_one_for_both_and_one_for_each_head(tmp_path):
    both = load(with_scales(tmp_path / "both", {"kv_scale": K}), "fp8_per_head").recipe.static_scales
    assert both.layers[1].k == both.layers[1].v == pytest.approx((448 * K, 448 * K))
    given = {"k_scale": [K, V], "v_scale": [[V], [K]]}
    each = load(with_scales(tmp_path / "each", given), "fp8_per_head").recipe.static_scales
    assert each.layers[0].k == pytest.approx((448 * K, 448 * V))
    assert each.layers[0].v == pytest.approx((448 * V, 448 * K))


def test_other_formats_load_and_name_them(tmp_path, caplog):
    load(with_scales(tmp_path, {"k_scale": K, "v_scale": V}), "int8")
    assert "self_attn.k_scale): fp8_per_head and int8_per_head take them, other formats do not" in caplog.text


@pytest.mark.parametrize(
    ("scales", "why"),
    [
        ({"k_scale": -1.0, "v_scale": -1.0}, "holds no scale above 0"),
        ({"k_scale": 0.0, "v_scale": V}, "holds no scale above 0"),
        ({"k_scale": float("nan"), "v_scale": V}, "holds no scale above 0"),
        ({"k_scale": [K, K, K], "v_scale": V}, "or one for each"),
        ({"k_scale": K}, "layer 0 has none"),
        ({"k_scale": K, "v_scale": V, "k_zero_point": 3.0}, "self_attn.k_zero_point is not zero everywhere"),
    ],
)
def test_what_is_no_scale_is_passed_over_by_name(scales, why, tmp_path, caplog):
    folder = with_scales(tmp_path, scales)
    load(folder, "fp32")
    [told] = [record.getMessage() for record in caplog.records if "passed over" in record.getMessage()]
    assert "self_attn.k_scale" in told
    assert why in told
    with pytest.raises(ConfigError, match="needs static scales and none were given"):
        load(folder, "fp8_per_head").session(max_tokens=8)


def test_what_lies_beside_them_is_no_stranger(tmp_path):
    """As compressed-tensors and vLLM write them: scales of queries, of probabilities, and zero points."""
    beside = {"q_scale": 0.1, "prob_scale": 1.0, "k_zero_point": [0.0], "v_zero_point": [0.0]}
    folder = with_scales(tmp_path, {"k_scale": K, "v_scale": V, **beside})
    load(folder, "fp8_per_head").session(max_tokens=8)


def test_they_are_of_what_is_not_rotated(tmp_path):
    folder = with_scales(tmp_path, {"k_scale": K, "v_scale": V})
    with pytest.raises(ConfigError, match=r"fp8_per_head_rot rotates K, and the checkpoint's scales are of"):
        load(folder, "fp8_per_head_rot")


def test_a_kvq_json_counts_before_them(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    folder = with_scales(tmp_path, {"k_scale": K, "v_scale": V})
    recipe = load(folder, "fp8_per_head").recipe
    recipe.save(folder / "kvq.json")
    assert json.loads((folder / "kvq.json").read_text())["static_scales"]["layers"][0]["k_rotated"] is None
    caplog.clear()
    assert load(folder, "fp8_per_head").recipe.static_scales == recipe.static_scales
    assert "brings scales" not in caplog.text
