"""Static scales: their formula, and what a file of them must hold."""

import math
from typing import Any

import numpy as np
import pytest

from kvq.errors import ConfigError
from kvq.formats import HeadMaxima, StaticScales, parse_format

MAXIMA = HeadMaxima(k=(8.0, 3.5), v=(1.0, 0.25), k_rotated=(4.0, 2.0), v_rotated=(0.5, 0.125))


def scales_json() -> dict[str, Any]:
    """A fresh JSON object of two layers with two KV heads."""
    return StaticScales(
        model_digest="aa" * 32, text_digest="bb" * 32, tokens=63, layers=(MAXIMA, MAXIMA)
    ).to_json()


def test_a_static_scale_is_the_maximum_over_the_largest_code() -> None:
    assert MAXIMA.scales("k", parse_format("fp8_per_head", 64)) == (8.0 / 448, 3.5 / 448)
    assert MAXIMA.scales("v", parse_format("int8_per_head", 64)) == (1.0 / 127, 0.25 / 127)


def test_a_rotated_format_takes_the_maxima_seen_after_rotation() -> None:
    assert MAXIMA.scales("k", parse_format("fp8_per_head_rot", 64)) == (4.0 / 448, 2.0 / 448)
    assert MAXIMA.scales("v", parse_format("int8_per_head_rot", 64)) == (0.5 / 127, 0.125 / 127)


@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-40, 1e-30, 3.4e38])
@pytest.mark.parametrize("name", ["fp8_per_head", "int8_per_head"])
def test_a_static_scale_is_a_positive_finite_fp32_number(name: str, amax: float) -> None:
    maxima = HeadMaxima(k=(amax,), v=(amax,), k_rotated=(amax,), v_rotated=(amax,))
    (scale,) = maxima.scales("k", parse_format(name, 64))
    assert np.isfinite(np.float32(scale))
    assert np.float32(scale) > 0


def test_scales_survive_json_unchanged() -> None:
    scales = StaticScales(model_digest="a", text_digest="b", tokens=63, layers=(MAXIMA,))
    assert StaticScales.from_json(scales.to_json()) == scales


def test_scales_of_another_model_are_refused() -> None:
    scales = StaticScales.from_json(scales_json())
    scales.check(model_digest="aa" * 32, kv_heads=[2, 2])
    with pytest.raises(ConfigError, match=r"belong to another model \(digest aaaaaaaaaaaa.*kvq calibrate"):
        scales.check(model_digest="cc" * 32, kv_heads=[2, 2])


@pytest.mark.parametrize("kv_heads", [[2], [2, 2, 2], [2, 1], [1, 1], [4, 4]])
def test_a_wrong_number_of_heads_or_layers_is_refused(kv_heads: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"hold \[2, 2\] KV heads per layer.*kvq calibrate"):
        StaticScales.from_json(scales_json()).check(model_digest="aa" * 32, kv_heads=kv_heads)


@pytest.mark.parametrize("part", ["k", "v", "k_rotated", "v_rotated"])
@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, 0, 0.0, -0.0, -1.0, -math.inf, 1e39, 10**400, "1.0", None, True, [1.0]],
    ids=lambda x: repr(x)[:5],
)
def test_a_maximum_that_is_no_finite_number_above_0_is_refused(part: str, value: object) -> None:
    data = scales_json()
    data["layers"][1][part][0] = value
    with pytest.raises(ConfigError, match=rf"static_scales\.layers\[1\]\.{part} must be a list of finite"):
        StaticScales.from_json(data)


def test_heads_must_agree_over_the_four_lists_of_a_layer() -> None:
    data = scales_json()
    data["layers"][0]["v_rotated"].append(1.0)
    with pytest.raises(ConfigError, match=r"layers\[0\]\.v_rotated holds 3 heads, expected 2"):
        StaticScales.from_json(data)


@pytest.mark.parametrize("key", ["model_digest", "text_digest", "tokens", "layers"])
def test_a_missing_key_is_refused(key: str) -> None:
    data = scales_json()
    del data[key]
    with pytest.raises(ConfigError, match="must hold model_digest, text_digest, tokens and layers"):
        StaticScales.from_json(data)


@pytest.mark.parametrize("key", ["k", "v", "k_rotated", "v_rotated"])
def test_a_layer_that_misses_a_list_is_refused(key: str) -> None:
    data = scales_json()
    del data["layers"][1][key]
    with pytest.raises(ConfigError, match=r"layers\[1\] must hold k, v, k_rotated, v_rotated"):
        StaticScales.from_json(data)


@pytest.mark.parametrize("data", [None, [], "x", 1, {"layers": []}])
def test_what_is_no_object_of_scales_is_refused(data: object) -> None:
    with pytest.raises(ConfigError, match="static_scales must hold"):
        StaticScales.from_json(data)


@pytest.mark.parametrize(
    ("key", "value"), [("layers", {}), ("layers", None), ("tokens", "many"), ("tokens", 1.5)]
)
def test_layers_and_tokens_have_their_types(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=r"static_scales\.layers must be a list and static_scales\.tokens"):
        StaticScales.from_json({**scales_json(), key: value})


@pytest.mark.parametrize("part", ["k", "v", "k_rotated", "v_rotated"])
def test_numbers_that_were_changed_cut_or_moved_are_refused_by_layer_and_field(part: str) -> None:
    """Every number alone is a good one; the digest knows which list, layer and model it was made for."""
    permuted, edited, moved, cut, foreign = (scales_json() for _ in range(5))
    permuted["layers"][1][part].reverse()
    edited["layers"][1][part][0] *= 1.0001
    other = "v" if part.startswith("k") else "k"
    moved["layers"][1][part] = list(moved["layers"][1][other])
    cut["layers"][1][part].pop()
    foreign["model_digest"] = "cc" * 32
    for data in (permuted, edited, moved):
        with pytest.raises(ConfigError, match=rf"layers\[1\]\.{part} is not what calibration wrote"):
            StaticScales.from_json(data)
    with pytest.raises(ConfigError, match=r"layers\[1\]\.\w+ holds \d heads, expected \d"):
        StaticScales.from_json(cut)
    with pytest.raises(ConfigError, match=r"layers\[0\]\.k is not what calibration wrote"):
        StaticScales.from_json(foreign)


def test_swapped_layers_are_refused() -> None:
    other = HeadMaxima(k=(1.0, 2.0), v=(3.0, 4.0), k_rotated=(5.0, 6.0), v_rotated=(7.0, 8.0))
    scales = StaticScales(model_digest="aa", text_digest="bb", tokens=63, layers=(MAXIMA, other))
    data = scales.to_json()
    assert isinstance(data["layers"], list)
    data["layers"].reverse()
    with pytest.raises(ConfigError, match=r"layers\[0\]\.k is not what calibration wrote"):
        StaticScales.from_json(data)
