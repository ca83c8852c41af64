"""Static scales: observed through the real attention path, bound to their model, never silently 1."""

import json

import pytest
import torch

import kvq
from kvq.calib import calibrate
from kvq.errors import ConfigError
from kvq.evals import EvalText, calibration_text
from kvq.formats import KVRecipe
from kvq.kernels.codec import rotate
from kvq.models.resolve import EMBEDDED

TEXT = EvalText(name="a text", text=calibration_text().text[:2000])


def eager_kv(model, ids):
    """K (after RoPE) and V of every layer from transformers' own cache, [kv_heads, tokens, dim]."""
    hf = model.weights.model
    hf.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            cache = hf(torch.tensor([ids]), use_cache=True).past_key_values
    finally:
        hf.set_attn_implementation("kvq")
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def test_maxima_are_those_of_transformers_own_cache(tiny):
    scales = calibrate(tiny, TEXT, context=128, max_windows=1)
    ids = tiny.tokenizer(TEXT.text)["input_ids"][:128]
    for layer, (k, v) in zip(scales.layers, eager_kv(tiny, ids), strict=True):
        for seen, rows in (
            (layer.k, k),
            (layer.v, v),
            (layer.k_rotated, rotate(k)),
            (layer.v_rotated, rotate(v)),
        ):
            assert seen == pytest.approx(rows.abs().amax((1, 2)).tolist(), rel=1e-4)


def test_the_embedded_model_ships_scales_that_belong_to_it(tiny):
    recipe = KVRecipe.load(EMBEDDED["tiny"] / "kvq.json")
    assert recipe.static_scales.model_digest == tiny.weights.digest
    assert recipe.static_scales.tokens > 10_000
    for kv in ("fp8_per_head", "int8_per_head", "int8_per_head_rot", "fp8_per_head/int4"):
        tiny.with_kv(kv).logits([1, 2, 3])


def test_static_codes_use_the_calibrated_scale(tiny):
    model = tiny.with_kv("int8_per_head")
    session = model.session(max_tokens=8)
    layer = model.static_scales.layers[3]
    assert session.cache.layer(3).k.static_scale.tolist() == pytest.approx([a / 127 for a in layer.k])
    fp8 = tiny.with_kv("fp8_per_head_rot").session(max_tokens=8)
    assert fp8.cache.layer(3).v.static_scale.tolist() == pytest.approx([a / 448 for a in layer.v_rotated])


@pytest.fixture
def bare_copy(tmp_path):
    """The embedded model without its kvq.json."""
    import shutil

    folder = tmp_path / "bare"
    shutil.copytree(EMBEDDED["tiny"], folder, ignore=shutil.ignore_patterns("kvq.json"))
    return folder


def test_a_static_format_without_scales_names_the_command(bare_copy):
    with pytest.raises(ConfigError, match=r"kvq calibrate .*--calibrate-on-load"):
        kvq.load(bare_copy, kv="fp8_per_head")


def test_calibrate_on_load_makes_the_scales_that_ship_and_writes_nothing(bare_copy, tiny):
    model = kvq.load(bare_copy, kv="fp8_per_head", calibrate_on_load=True)
    assert not (bare_copy / "kvq.json").exists()
    if model.static_scales.text_digest != tiny.static_scales.text_digest:
        pytest.skip("this CPython has other help topics than the shipped scales were made from")
    for ours, shipped in zip(model.recipe.static_scales.layers, tiny.static_scales.layers, strict=True):
        assert ours.k == pytest.approx(shipped.k, rel=1e-3)
        assert ours.v_rotated == pytest.approx(shipped.v_rotated, rel=1e-3)
    expected = tiny.with_kv("fp8_per_head").logits([5, 6, 7, 8])
    assert torch.allclose(model.logits([5, 6, 7, 8]), expected, atol=1e-2)


def test_another_models_scales_are_refused(bare_copy, tmp_path):
    data = json.loads((EMBEDDED["tiny"] / "kvq.json").read_text())
    data["static_scales"]["model_digest"] = "0" * 32
    other = tmp_path / "other.json"
    other.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="belong to another model"):
        kvq.load(bare_copy, kv="int8_per_head", scales=other)


def test_scales_that_nothing_uses_are_refused_not_ignored(bare_copy):
    with pytest.raises(ConfigError, match="int4 uses none"):
        kvq.load(bare_copy, kv="int4", scales=EMBEDDED["tiny"] / "kvq.json")


def test_a_recipe_file_round_trips_through_load(bare_copy, tmp_path, tiny):
    path = tmp_path / "kvq.json"
    recipe = KVRecipe.uniform("int8_per_head/int4", tiny.geometry.head_dims)
    recipe.with_scales(tiny.static_scales).save(path)
    model = kvq.load(bare_copy, kv=str(path))
    expected = tiny.with_kv("int8_per_head/int4").logits([9, 8, 7])
    assert torch.equal(model.logits([9, 8, 7]), expected)
