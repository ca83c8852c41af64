"""Centers: kept to the last bit, for grouped formats only, and refused when anything about them is off."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvq.errors import ConfigError
from kvq.formats import Centers, KVRecipe, LayerCenters

DIGEST = "0123456789abcdef" * 4
HEADS = [2, 1]
DIMS = [(8, 16), (16, 8)]


def rows(heads: int, dim: int, seed: int) -> tuple[tuple[float, ...], ...]:
    """Centers that no two channels share."""
    return tuple(tuple(seed + head / 7 + i / 3 for i in range(dim)) for head in range(heads))


def centers() -> Centers:
    """Two layers; the second leaves its K as it is."""
    layers = (LayerCenters(k=rows(2, 8, 1), v=rows(2, 16, -2)), LayerCenters(k=None, v=rows(1, 8, 3)))
    return Centers(model_digest=DIGEST, text_digest="t", tokens=63, layers=layers)


def recipe(kv: str = "int4_g8") -> KVRecipe:
    """A recipe with those centers."""
    return replace(KVRecipe.uniform(kv, DIMS), centers=centers())


def test_a_recipe_with_centers_survives_its_file(tmp_path: Path) -> None:
    recipe().save(tmp_path / "kvq.json")
    loaded = KVRecipe.load(tmp_path / "kvq.json")
    assert loaded.centers == centers()
    assert loaded.digest() == recipe().digest() != KVRecipe.uniform("int4_g8", DIMS).digest()


def test_centers_of_another_model_or_other_heads_are_refused() -> None:
    recipe().check_belongs(model_digest=DIGEST, kv_heads=HEADS)
    with pytest.raises(ConfigError, match="centers belong to another model"):
        recipe().check_belongs(model_digest="ff" * 32, kv_heads=HEADS)
    with pytest.raises(ConfigError, match=r"centers\.layers\[1\]\.v holds 1 KV heads, expected 2"):
        recipe().check_belongs(model_digest=DIGEST, kv_heads=[2, 2])


@pytest.mark.parametrize("kv", ["int8", "fp8", "bf16", "int8_per_head"])
def test_only_grouped_formats_have_centers(kv: str) -> None:
    with pytest.raises(ConfigError, match=r"centers\.layers\[0\]\.k belongs to .*in groups, such as int4"):
        recipe(kv)


def test_centers_must_be_of_the_recipes_layers_and_channels() -> None:
    with pytest.raises(ConfigError, match=r"centers\.layers holds 2 layers, expected 1"):
        replace(KVRecipe.uniform("int4_g8", DIMS[:1]), centers=centers())
    with pytest.raises(ConfigError, match=r"centers\.layers\[0\]\.k\[0\] holds 8 channels, expected 16"):
        replace(KVRecipe.uniform("int4_g8", DIMS[::-1]), centers=centers())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda layers: layers.reverse(), r"centers\.layers\[0\]\.k is not what calibration wrote"),
        (lambda layers: layers[0]["k"].reverse(), r"centers\.layers\[0\]\.k is not what"),
        (lambda layers: layers[0]["v"][1].reverse(), r"centers\.layers\[0\]\.v is not what"),
        (lambda layers: layers[1].update(k=[[0.0] * 16]), r"centers\.layers\[1\]\.k is not what"),
        (lambda layers: layers[1].update(v=None), r"centers\.layers\[1\]\.v is not what"),
        (lambda layers: layers[0]["k"][1].pop(), r"centers\.layers\[0\]\.k\[1\] holds 7 channels"),
        (
            lambda layers: layers[0]["k"][0].__setitem__(3, math.nan),
            r"layers\[0\]\.k\[0\]\[3\]: numbers must be finite",
        ),
        (lambda layers: layers[0].update(k=[]), r"layers\[0\]\.k must be null or a list"),
        (lambda layers: layers[0].pop("v"), r"layers\[0\] must hold k, v and digests"),
        (lambda layers: layers.pop(), r"centers\.layers holds 1 layers, expected 2"),
    ],
)
def test_changed_centers_are_refused_by_layer_and_field(change: Any, reason: str, tmp_path: Path) -> None:
    data: Any = recipe().to_json()
    change(data["centers"]["layers"])
    (tmp_path / "kvq.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=reason):
        KVRecipe.load(tmp_path / "kvq.json")


@pytest.mark.parametrize(
    ("clip", "kv"), [(0.0, "int2_g8"), (1.5, "int2_g8"), (math.nan, "int2_g8"), (0.5, "int4_g8")]
)
def test_a_clip_is_a_part_of_the_range_of_2_bit_groups(clip: float, kv: str, tmp_path: Path) -> None:
    data: Any = KVRecipe.uniform(kv, DIMS).to_json()
    data["layers"][0]["v_clip"] = clip
    (tmp_path / "kvq.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="v_clip"):
        KVRecipe.load(tmp_path / "kvq.json")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data["layers"].reverse(), r"layers\[0\] is not what calibration wrote"),
        (lambda data: data["layers"][1].update(v="int4_g4"), r"layers\[1\] is not what"),
        (lambda data: data["layers"][1].update(v_clip=0.8), r"layers\[1\] is not what"),
        (lambda data: data["layers"][0].pop("digest"), r"layers\[0\] is not what"),
        (lambda data: data.update(centers=None), r"layers\[0\] is not what"),
        (lambda data: data.update(model_digest="ff" * 32), r"layers\[0\] is not what|another model"),
        (lambda data: data["layers"].pop(), r"layers"),
        (lambda data: data.update(model_digest=7), "model_digest must be a digest"),
        (lambda data: data.update(format_version=2.0), "format_version must be 2"),
    ],
)
def test_a_changed_recipe_is_refused_by_layer(change: Any, reason: str, tmp_path: Path) -> None:
    made = replace(KVRecipe.uniform("int2_g8", [(16, 16), (16, 16)]), model_digest=DIGEST)
    layers = (LayerCenters(k=rows(2, 16, 1)), LayerCenters(v=rows(1, 16, 2)))
    made = replace(made, centers=replace(centers(), layers=layers))
    data: Any = json.loads(json.dumps(made.to_json()))
    assert KVRecipe.from_json(data) == replace(made, label="")
    change(data)
    (tmp_path / "kvq.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=reason):
        KVRecipe.load(tmp_path / "kvq.json")


def test_a_recipe_made_for_one_model_is_refused_by_another() -> None:
    made = replace(KVRecipe.uniform("int8", DIMS), model_digest=DIGEST)
    made.check_belongs(model_digest=DIGEST, kv_heads=HEADS)
    with pytest.raises(ConfigError, match="these formats belong to another model"):
        made.check_belongs(model_digest="ee" * 32, kv_heads=HEADS)


def test_a_clip_survives_the_file(tmp_path: Path) -> None:
    made = KVRecipe.uniform("int2_g8", DIMS)
    made = replace(made, layers=(replace(made.layers[0], k_clip=0.75), made.layers[1]))
    made.save(tmp_path / "kvq.json")
    assert KVRecipe.load(tmp_path / "kvq.json") == replace(made, label="")
