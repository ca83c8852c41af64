"""Static scales: observed through the real attention path, bound to their model, never silently 1."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvq
from kvq.calib import calibrate, observe
from kvq.calib.observe import _Magnitudes
from kvq.errors import ConfigError
from kvq.evals import EvalText, calibration_text
from kvq.formats import KVRecipe
from kvq.kernels.codec import rotate
from kvq.models.describe.resolve import EMBEDDED

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
    recipe = KVRecipe.load(EMBEDDED["tiny"] / "kvq.json")
    other = tmp_path / "other.json"
    recipe.with_scales(replace(recipe.static_scales, model_digest="0" * 32)).save(other)
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


def test_centers_are_the_means_of_transformers_own_cache(tiny):
    centers = observe(tiny, TEXT, context=128, max_windows=1).centers()
    ids = tiny.tokenizer(TEXT.text)["input_ids"][:128]
    for layer, (k, v) in zip(centers.layers, eager_kv(tiny, ids), strict=True):
        assert torch.allclose(torch.tensor(layer.k), k.mean(1), atol=1e-4)
        assert torch.allclose(torch.tensor(layer.v), v.mean(1), atol=1e-4)


def test_percentiles_and_maxima_are_those_of_the_elements():
    rows = (
        torch.randn(500, 3, 60, generator=torch.Generator().manual_seed(1))
        * torch.tensor([1e-3, 1.0, 1e4])[:, None]
    )
    seen = _Magnitudes(3)
    for some in rows.split(63):
        seen.update(some)
    size = rows.abs().transpose(0, 1).flatten(1)
    assert torch.equal(seen.absmax, size.amax(1))
    for share in (0.5, 0.99, 0.999, 1.0):
        expected = torch.quantile(size, share, dim=1).tolist()
        assert seen.percentile(share) == pytest.approx(expected, rel=0.03)


def test_the_least_squares_clip_is_the_best_of_all_clips():
    """Against trying them on the elements themselves; outliers alone decide a maximum."""
    rows = torch.randn(400, 1, 64, generator=torch.Generator().manual_seed(2))
    rows[7, 0, 3] = 60.0
    seen = _Magnitudes(1)
    seen.update(rows)

    def error(clip, levels):
        step = clip / levels
        return ((rows / step).round().clamp(-levels, levels) * step - rows).square().mean().item()

    for levels in (7, 127):
        (clip,) = seen.least_squares_clip(levels)
        best = min(error(float(c), levels) for c in torch.linspace(1.0, 60.0, 600))
        assert error(clip, levels) < 1.03 * best
    assert seen.least_squares_clip(7)[0] < 10 < seen.absmax.item()


def test_zeros_and_subnormals_are_counted_not_lost():
    rows = torch.zeros(10, 2, 8)
    rows[0, 1, 0] = 1e-42
    seen = _Magnitudes(2)
    seen.update(rows)
    assert seen.percentile(1.0)[0] == 0.0
    assert seen.least_squares_clip(127)[0] == 0.0


def test_a_head_that_is_always_zero_gets_a_scale_above_zero(bare_copy):
    path = bare_copy / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.2.self_attn.v_proj.weight"].zero_()
    save_file(tensors, path, {"format": "pt"})
    model = kvq.load(bare_copy)
    scales = calibrate(model, TEXT, context=64, max_windows=1)
    assert all(x > 0 for x in scales.layers[2].v)
    KVRecipe.uniform("int8_per_head", model.geometry.head_dims).with_scales(scales).save(
        bare_copy / "kvq.json"
    )
    assert KVRecipe.load(bare_copy / "kvq.json").static_scales == scales


@pytest.mark.long
def test_static_scales_cost_at_most_three_thousandths_over_their_twins(tiny):
    names = ("fp8_per_head", "int8_per_head", "int8_per_head_rot", "fp8_per_head_rot")
    twins = {name: name.replace("_per_head", "") for name in names}
    rows = kvq.perplexity(tiny, ["fp32", *names, *twins.values()], max_windows=4)
    found = {row["kv"]: row["perplexity"] for row in rows}
    for name, twin in twins.items():
        assert abs(found[name] / found[twin] - 1) < 0.003
