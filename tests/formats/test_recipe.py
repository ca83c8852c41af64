"""Recipes: kvq.json is read back as written, or refused with a reason."""

import json
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from kvq.errors import ConfigError
from kvq.formats import HeadMaxima, KVRecipe, LayerFormats, StaticScales, parse_format

HEAD_DIMS = [(64, 64), (60, 48), (192, 128)]
EXACT = ["sinks=4", "recent=4", "sinks=4+recent=4", "sinks=4+recent=8", "sinks=8+recent=4"]
DIGEST = "0123456789abcdef" * 4


def scales(heads: tuple[int, ...] = (2, 3, 1)) -> StaticScales:
    """Maxima that no two heads share."""
    layers = []
    for i, count in enumerate(heads):
        rows = {
            part: tuple(0.1 + i + j / 7 + k / 3 for j in range(count))
            for k, part in enumerate(("k", "v", "k_rotated", "v_rotated"))
        }
        layers.append(HeadMaxima(**rows))
    return StaticScales(model_digest=DIGEST, text_digest="ff" * 32, tokens=63, layers=tuple(layers))


def write(path: Path, change: dict[str, Any]) -> Path:
    """A good recipe file with some top keys replaced."""
    data = {**KVRecipe.uniform("int8", HEAD_DIMS).to_json(), **change}
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "kv",
    [
        *("fp32", "bf16", "fp8", "int8_rot", "int4", "int2", "k8v4", "k16v4", "int8/int4_g16", "q8_0/q4_1"),
        *("int3", "int5/int6", "int4_mean", "int4_g16_s8_mean/int2_g32_s8_rot", "int4_g64_rot/int2_g32_rot"),
        *("int3+sinks=4", "int4_mean+recent=128", "bf16+sinks=33+recent=1"),
    ],
)
def test_a_saved_recipe_loads_as_the_same_formats(kv: str, tmp_path: Path) -> None:
    recipe = KVRecipe.uniform(kv, [(64, 64), (128, 192)])
    recipe.save(tmp_path / "kvq.json")
    loaded = KVRecipe.load(tmp_path / "kvq.json")
    assert (loaded.layers, loaded.exact) == (recipe.layers, recipe.exact)
    assert loaded.static_scales is None
    assert loaded.digest() == recipe.digest()


def test_static_scales_are_saved_and_loaded_to_the_last_bit(tmp_path: Path) -> None:
    recipe = KVRecipe.uniform("fp8_per_head/int8_per_head_rot", HEAD_DIMS).with_scales(scales())
    recipe.save(tmp_path / "kvq.json")
    loaded = KVRecipe.load(tmp_path / "kvq.json")
    assert loaded.static_scales == scales()
    assert loaded.layers == recipe.layers
    assert loaded.digest() == recipe.digest()
    loaded.require_scales()
    loaded.check_belongs(model_digest=DIGEST, kv_heads=[2, 3, 1])


def test_the_digest_changes_with_formats_and_with_scales() -> None:
    plain = KVRecipe.uniform("fp8_per_head", HEAD_DIMS)
    digests = {
        plain.digest(),
        KVRecipe.uniform("int8_per_head", HEAD_DIMS).digest(),
        KVRecipe.uniform("fp8_per_head_rot", HEAD_DIMS).digest(),
        KVRecipe.uniform("fp8_per_head/int8_per_head", HEAD_DIMS).digest(),
        plain.with_scales(scales()).digest(),
        plain.with_scales(scales((2, 3, 2))).digest(),
        *(KVRecipe.uniform(kv, HEAD_DIMS).digest() for kv in ("int4", "int4_mean", "int4_rot+recent=1")),
        *(KVRecipe.uniform(f"fp8_per_head+{end}", HEAD_DIMS).digest() for end in EXACT),
    }
    assert len(digests) == 9 + len(EXACT)


def test_one_name_gives_every_layer_the_group_its_own_dimension_allows() -> None:
    recipe = KVRecipe.uniform("int4", HEAD_DIMS)
    assert [(x.k.name, x.v.name) for x in recipe.layers] == [
        ("int4_g32_s8_rot", "int4_g32_s8_rot"),
        ("int4_g30_s8_rot", "int4_g24_s8_rot"),
        ("int4_g32_s8_rot", "int4_g32_s8_rot"),
    ]


def test_bits_per_element_weigh_layers_by_their_elements() -> None:
    recipe = KVRecipe.uniform("int8/int4_g64", [(128, 128), (64, 128)])
    # K int8: 128 + 2 and 64 + 2 bytes; V int4_g64: 64 + 8 bytes; 2 and 3 heads
    bits = 8 * (2 * (130 + 72) + 3 * (66 + 72))
    assert recipe.bits_per_element([2, 3]) == Fraction(bits, 2 * 256 + 3 * 192)
    for kv in ("int4_g64", "int4"):
        assert KVRecipe.uniform(kv, [(128, 128)]).bits_per_element([5]) == Fraction(9, 2)


@pytest.mark.parametrize("block_size", [1, 16, 32, 40])
def test_bits_per_element_share_a_mean_among_a_blocks_tokens(block_size: int) -> None:
    recipe = KVRecipe.uniform("int3_mean/int4_g64_mean+sinks=4", [(128, 128), (64, 128)])
    # codes and scales of K: 48 + 8 and 24 + 4 bytes, of V: 64 + 8; means: 64 + 4 and 32 + 2; 2 and 3 heads
    rows = 2 * (56 + 72) + 3 * (28 + 72)
    means = Fraction(2 * (68 + 68) + 3 * (34 + 68), block_size)
    expected = 8 * (rows + means) / (2 * 256 + 3 * 192)
    assert recipe.bits_per_element([2, 3], block_size) == expected
    assert block_size != 32 or recipe.bits_per_element([2, 3]) == expected


def test_a_name_without_a_label_is_the_common_pair_or_mixed(tmp_path: Path) -> None:
    def reloaded(kv: str, dims: list[tuple[int, int]]) -> str:
        KVRecipe.uniform(kv, dims).save(tmp_path / "kvq.json")
        return KVRecipe.load(tmp_path / "kvq.json").name

    assert KVRecipe.uniform("K8V4", HEAD_DIMS).name == "k8v4"
    assert reloaded("int8", HEAD_DIMS) == "int8_per_token_head"
    assert reloaded("int8/int4_g32", [(64, 64)]) == "int8_per_token_head/int4_g32"
    assert reloaded("int4", HEAD_DIMS) == "mixed"
    assert reloaded("int4+recent=64+sinks=4", HEAD_DIMS) == "mixed+sinks=4+recent=64"
    assert reloaded("int3_mean+recent=128", [(64, 64)]) == "int3_g32_s8_mean_rot+recent=128"
    assert KVRecipe.uniform(" INT3+Recent=7 ", [(64, 64)]).name == "int3+recent=7"


@pytest.mark.parametrize(
    "kv", ["fp8_per_head", "int8_per_head", "int8/fp8_per_head", "int8_per_head_rot/bf16"]
)
def test_a_static_format_without_scales_is_refused_and_never_scaled_by_1(kv: str) -> None:
    recipe = KVRecipe.uniform(kv, HEAD_DIMS)
    assert recipe.is_static
    with pytest.raises(ConfigError, match=r"needs static scales") as refused:
        recipe.require_scales()
    assert "kvq calibrate" in str(refused.value)
    assert "--calibrate-on-load" in str(refused.value)
    scaled = recipe.with_scales(scales())
    scaled.require_scales()
    scaled.check_belongs(model_digest=DIGEST, kv_heads=[2, 3, 1])


def test_dynamic_formats_need_no_scales() -> None:
    recipe = KVRecipe.uniform("int8/int4", HEAD_DIMS)
    assert not recipe.is_static
    recipe.require_scales()
    recipe.check_belongs(model_digest=DIGEST, kv_heads=[2, 3, 1])


@pytest.mark.parametrize(
    ("digest", "kv_heads", "reason"),
    [
        ("f" * 64, [2, 3, 1], "another model"),
        (DIGEST, [2, 3], "KV heads per layer"),
        (DIGEST, [2, 3, 2], "KV heads per layer"),
        (DIGEST, [1, 1, 1], "KV heads per layer"),
    ],
)
def test_scales_of_another_model_are_refused(digest: str, kv_heads: list[int], reason: str) -> None:
    recipe = KVRecipe.uniform("fp8_per_head", HEAD_DIMS).with_scales(scales())
    with pytest.raises(ConfigError, match=reason):
        recipe.check_belongs(model_digest=digest, kv_heads=kv_heads)


@pytest.mark.parametrize("version", [0, 1, 3, "2", None, 2.5, []])
def test_an_unknown_version_is_refused(version: object, tmp_path: Path) -> None:
    path = write(tmp_path / "other.json", {"format_version": version})
    with pytest.raises(ConfigError, match=r"other\.json: format_version must be 2, got .*kvq calibrate"):
        KVRecipe.load(path)


def test_an_unknown_key_is_refused_with_the_nearest(tmp_path: Path) -> None:
    path = write(tmp_path / "odd.json", {"static_scale": None})
    with pytest.raises(
        ConfigError, match=r"odd\.json: unknown key 'static_scale'; did you mean 'static_scales'"
    ):
        KVRecipe.load(path)
    layer = {"k": "int8", "v": "int8", "k_head_dim": 64, "v_head_dim": 64, "k_headdim": 1}
    with pytest.raises(
        ConfigError, match=r"odd\.json: layers\[0\]: unknown key 'k_headdim'; did you mean 'k_head_dim'"
    ):
        KVRecipe.load(write(path, {"layers": [layer]}))


@pytest.mark.parametrize("key", ["format_version", "layers", "static_scales"])
def test_a_missing_key_is_refused(key: str, tmp_path: Path) -> None:
    data = KVRecipe.uniform("int8", HEAD_DIMS).to_json()
    del data[key]
    (tmp_path / "few.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=rf"few\.json: .*{key}"):
        KVRecipe.load(tmp_path / "few.json")


@pytest.mark.parametrize("key", ["k", "v", "k_head_dim", "v_head_dim"])
def test_a_layer_that_misses_a_key_is_refused(key: str, tmp_path: Path) -> None:
    layer = {"k": "int8", "v": "int8", "k_head_dim": 64, "v_head_dim": 64}
    del layer[key]
    with pytest.raises(ConfigError, match=rf"few\.json: layers\[0\]: missing key '{key}'"):
        KVRecipe.load(write(tmp_path / "few.json", {"layers": [layer]}))


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        ({"k": "int9"}, "unknown KV format 'int9'"),
        ({"v": 4}, "unknown KV format '4'"),
        ({"k": "int4_g32", "k_head_dim": 80}, "use one of"),
        ({"v": "int4_g8", "v_head_dim": 63}, "multiple of 2, got 63"),
        ({"k_head_dim": 0}, "k_head_dim must be 1 to 65536 elements, got 0"),
        ({"k_head_dim": -64}, "k_head_dim must be"),
        ({"v_head_dim": 64.0}, "v_head_dim must be"),
        ({"v_head_dim": True}, "v_head_dim must be"),
        ({"v_head_dim": "64"}, "v_head_dim must be"),
        ({"k_head_dim": 2**40}, "k_head_dim must be"),
    ],
)
def test_a_layer_with_a_value_that_does_not_fit_is_refused(
    layer: dict[str, object], reason: str, tmp_path: Path
) -> None:
    whole = {"k": "int8", "v": "int8", "k_head_dim": 64, "v_head_dim": 64, **layer}
    with pytest.raises(ConfigError, match=rf"bad\.json: .*{reason}"):
        KVRecipe.load(write(tmp_path / "bad.json", {"layers": [whole]}))


@pytest.mark.parametrize("layers", [[], {}, None, "int8", ["int8"], [None]])
def test_layers_must_be_a_list_of_objects(layers: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"bad\.json: .*layer"):
        KVRecipe.load(write(tmp_path / "bad.json", {"layers": layers}))


@pytest.mark.parametrize(
    "literal", ["NaN", "Infinity", "-Infinity", "-0.5", "1e400", "1e39", "1" + "0" * 400]
)
def test_a_scale_that_is_no_finite_positive_number_is_refused_with_the_file(
    literal: str, tmp_path: Path
) -> None:
    text = json.dumps(KVRecipe.uniform("fp8_per_head", HEAD_DIMS).with_scales(scales()).to_json())
    first = repr(scales().layers[0].k[0])
    assert text.count(first) == 1
    (tmp_path / "nan.json").write_text(text.replace(first, literal))
    with pytest.raises(ConfigError, match=r"nan\.json.*static_scales\.layers\[0\]\.k"):
        KVRecipe.load(tmp_path / "nan.json")


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b'{"format_version": ' + b"1" * 5000 + b"}"],
    ids=["empty", "cut", "not-utf8", "deep", "huge-number"],
)
def test_a_file_that_is_not_json_is_refused_by_name(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "junk.json").write_bytes(raw)
    with pytest.raises(ConfigError, match=r"junk\.json is not JSON"):
        KVRecipe.load(tmp_path / "junk.json")


@pytest.mark.parametrize("raw", [b"[]", b"null", b'"int4"', b"3"])
def test_json_that_is_no_object_is_refused_by_name(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "junk.json").write_bytes(raw)
    with pytest.raises(ConfigError, match=r"junk\.json: expected a JSON object"):
        KVRecipe.load(tmp_path / "junk.json")


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't read recipe .*none\.json: No such file"):
        KVRecipe.load(tmp_path / "none.json")


def test_a_failed_write_leaves_the_old_file_and_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kvq.json"
    old = KVRecipe.uniform("int8", HEAD_DIMS)
    old.save(path)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(ConfigError, match="No space left"):
        KVRecipe.uniform("int4", HEAD_DIMS).save(path)
    assert [x.name for x in tmp_path.iterdir()] == ["kvq.json"]
    assert KVRecipe.load(path).layers == old.layers


def test_a_layer_checks_its_formats_against_its_dimensions() -> None:
    with pytest.raises(ConfigError, match="head_dim=80"):
        KVRecipe.uniform("int4_g32", [(64, 64), (64, 80)])
    assert KVRecipe.uniform("int4_g20", [(80, 40)]).layers[0].k == parse_format("int4_g20", 80)


def test_a_clip_given_as_a_whole_number_is_digested_as_a_float(tmp_path: Path) -> None:
    layer = LayerFormats(
        k=parse_format("int2", 64), v=parse_format("int2", 64), k_head_dim=64, v_head_dim=64, k_clip=1
    )
    KVRecipe(layers=(layer,), model_digest=DIGEST).save(tmp_path / "kvq.json")
    assert KVRecipe.load(tmp_path / "kvq.json").layers == (layer,)
