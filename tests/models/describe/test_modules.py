"""What is wrong in a config.json is told by its field and by what transformers says of it."""

from pathlib import Path
from typing import Any

import pytest

from kvq.errors import ModelError
from kvq.geometry.support import ROPE_TYPES
from kvq.models.describe.modules import build_on_meta
from kvq.models.observe.support import check_supported
from tests.helpers_models import small_config

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
BENT: dict[str, tuple[dict[str, Any], str]] = {
    "kind of RoPE": (
        {"rope_parameters": YARN | {"rope_type": "yarm"}},
        r"rope_parameters can't be .*KeyError 'yarm'",
    ),
    "RoPE without a field": (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        r"rope_parameters .*\{'factor'\}",
    ),
    "RoPE's text for a number": ({"rope_parameters": YARN | {"factor": "4"}}, "rope_parameters can't be"),
    "activation": (
        {"hidden_act": "sillu"},
        "hidden_act can't be 'sillu' .* leaves it at 'silu' .*KeyError 'sillu'",
    ),
    "a text for a number": ({"hidden_size": "64"}, "hidden_size can't be '64' .*expected int, got str"),
    "a text for a truth": ({"attention_bias": "no"}, "attention_bias can't be 'no' .*expected bool"),
    "a list for a number": ({"head_dim": [16]}, r"head_dim can't be \[16\] .*expected int, got list"),
    "a kind of layers": (
        {"layer_types": ["full_attention", "full_atention"]},
        "layer_types can't be .*entries must be in",
    ),
    "too many kinds": (
        {"layer_types": ["full_attention"] * 3},
        "layer_types can't be .*must be equal to the number",
    ),
    "two faults": ({"hidden_act": "sillu", "attention_bias": "no"}, "attention_bias can't be 'no'"),
}


def config(**changes: Any) -> dict[str, Any]:
    """Of two layers, with every field, as saved ones have."""
    whole = small_config("qwen3", num_hidden_layers=2).to_dict()
    return whole | {"layer_types": ["full_attention"] * 2, "rope_parameters": YARN} | changes


@pytest.mark.parametrize("name", BENT)
def test_a_field_is_blamed_for_what_it_causes(name: str) -> None:
    changes, says = BENT[name]
    with pytest.raises(ModelError, match=says) as told:
        build_on_meta(Path("m"), config(**changes))
    assert ("layer_types" in str(told.value)) == ("layer_types" in changes)


def test_the_right_config_is_built() -> None:
    assert len(build_on_meta(Path("m"), config()).model.layers) == 2


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_a_misspelt_kind_of_rope_is_refused_with_the_nearest_before_anything_is_built(key: str) -> None:
    bent = config() | {"rope_parameters": None, key: YARN | {"rope_type": "yarm"}}
    with pytest.raises(ModelError, match=r"rope_type 'yarm' .*; did you mean 'yarn'"):
        check_supported(bent, max_context=None, folder=Path("m"))


def test_the_kinds_of_rope_are_transformers() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert set(ROPE_TYPES) == {*ROPE_INIT_FUNCTIONS, "default"}
