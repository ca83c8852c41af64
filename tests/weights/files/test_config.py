"""quantization_config: what is written is read back; what isn't understood is refused by field and value."""

import copy
from typing import Any

import pytest
from compressed_tensors.quantization import QuantizationConfig

from kvq.errors import ConfigError, ModelError
from kvq.formats.weights import parse_weight_format
from kvq.weights.files import FILE_FORMATS, check_fits, parse_config, quantization_config
from tests.weights.files.helpers import NAME

INT4, INT8, FP8 = (parse_weight_format(name) for name in ("int4", "int8", "fp8_a8"))
UP = "model.layers.11.mlp.up_proj"
DOWN = "model.layers.1.mlp.down_proj"


def compressed(**changed: Any) -> dict[str, Any]:
    return {**quantization_config("compressed-tensors", {NAME: INT4}, ["lm_head"], kv_scales=True), **changed}


def test_several_formats_are_groups_that_name_their_layers() -> None:
    formats = {NAME: INT4, UP: INT8, DOWN: FP8}
    config = quantization_config("compressed-tensors", formats, ["lm_head"], kv_scales=False)
    assert config["format"] == "mixed-precision"
    assert [group["targets"] for group in config["config_groups"].values()] == [[NAME], [UP], [DOWN]]
    scheme = parse_config(config)
    assert {name: scheme.format_of(name) for name in formats} == formats
    assert scheme.format_of("lm_head") is None
    assert scheme.names_of("lm_head") == ("lm_head.weight",)
    assert scheme.names_of(DOWN) == (f"{DOWN}.weight", f"{DOWN}.weight_scale")
    QuantizationConfig(**config)


@pytest.mark.parametrize("file_format", ["autogptq", "autoawq"])
def test_the_other_file_formats_hold_one_format_and_no_kv_scales(file_format: str) -> None:
    with pytest.raises(
        ConfigError, match="one format for all layers, got int4_g128, int4_g64; write compressed"
    ):
        quantization_config(
            file_format, {NAME: INT4, UP: parse_weight_format("int4_g64")}, [], kv_scales=False
        )
    with pytest.raises(ConfigError, match="can't hold scales of K and V"):
        quantization_config(file_format, {NAME: INT4}, [], kv_scales=True)


@pytest.mark.parametrize("file_format", FILE_FORMATS)
def test_layers_that_are_left_out_stay_out(file_format: str) -> None:
    ignore = ["lm_head", DOWN, "model.layers.11.mlp.gate"]
    config = quantization_config(file_format, {NAME: INT4, UP: INT4}, ignore, kv_scales=False)
    scheme = parse_config(config)
    assert all(scheme.format_of(name) is None for name in ignore)
    assert scheme.format_of("model.layers.11.mlp.down_proj") is not None


def test_what_awq_cannot_say_is_refused() -> None:
    """It leaves out every layer whose name contains a listed one."""
    with pytest.raises(ConfigError, match=r"can't say that \S+gate_proj is int4_g128 beside"):
        quantization_config(
            "autoawq", {"model.layers.0.mlp.gate_proj": INT4}, ["model.layers.0.mlp.gate"], kv_scales=False
        )
    with pytest.raises(ConfigError, match="can't say that lm_head is int4"):
        quantization_config("autoawq", {NAME: INT4, "lm_head": INT4}, [], kv_scales=False)


def test_gptq_says_whether_the_head_is_quantized() -> None:
    config = quantization_config(
        "autogptq", {NAME: INT4, "lm_head": INT4}, [], kv_scales=False, act_order=True
    )
    assert (config["lm_head"], config["desc_act"]) == (True, True)
    assert parse_config(config).format_of("lm_head") == INT4


def test_kv_scales_are_what_others_load() -> None:
    assert compressed()["kv_cache_scheme"] == {
        "num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False,
    }  # fmt: skip
    assert parse_config(compressed()).kv_scales
    assert not parse_config(compressed(kv_cache_scheme=None)).kv_scales


def test_unknown_file_formats_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown file format 'autoqptq'; did you mean 'autogptq'"):
        check_fits("autoqptq", INT4)


def test_targets_are_names_patterns_and_the_class_in_that_order() -> None:
    config = compressed(ignore=["re:.*lm_head", "re:vision_tower.*"])
    linear = config["config_groups"]["group_0"]
    pattern, exact = copy.deepcopy(linear), copy.deepcopy(linear)
    pattern["targets"], pattern["weights"]["group_size"] = [r"re:.*\.(down|up)_proj$"], 64
    exact["targets"], exact["weights"]["group_size"] = [DOWN], 32
    config["config_groups"] = {"a": linear, "b": pattern, "c": exact}
    scheme = parse_config(config)
    names = (NAME, UP, DOWN, "lm_head", "model.lm_head", "vision_tower.layers.0.up_proj")
    sizes = [getattr(scheme.format_of(name), "group_size", None) for name in names]
    assert sizes == [128, 64, 32, None, None, None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "fp8"}, "quant_method 'fp8', which kvq does not load; .* or 'bitsandbytes'"),
        ({"format": "nvfp4-pack-quantized"}, "format must be 'pack-quantized' or .*, got 'nvfp4"),
        ({"format": "marlin-24"}, "format must be"),
        ({"config_groups": {}}, "config_groups is empty"),
        ({"config_groups": {"W4A16": ["Linear"]}}, "config_groups.W4A16 must be an object"),
        ({"config_groups": None}, "config_groups must be an object, got None"),
        ({"ignore": "lm_head"}, "ignore must be a list of strings, got 'lm_head'"),
        ({"ignore": ["re:("]}, "is no regular expression"),
        ({"ignore": ["re:(a+)+b"]}, "too involved"),
        ({"ignore": ["re:" + ".*" * 6]}, "too involved"),
        ({"sparsity_config": {"format": "marlin"}}, "sparsity_config: format must be 'dense', got"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "transform_config must be absent"),
        ({"moe_sparsity_config": {"method": "prune"}}, "moe_sparsity_config must be absent"),
        ({"kv_cache_scheme": {"num_bits": 4}}, "kv_cache_scheme: num_bits must be 8, got 4"),
        ({"kv_cache_scheme": []}, r"kv_cache_scheme must be an object, got \[\]"),
        ({"kv_cache_schem": None}, "unknown field 'kv_cache_schem'; did you mean 'kv_cache_scheme'"),
        ({"quantization_status": "calibration"}, "quantization_status must be"),
    ],
)  # fmt: skip
def test_compressed_tensors_configs_are_refused_by_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_config(compressed(**changes))


@pytest.mark.parametrize(
    ("where", "changes", "message"),
    [
        ("weights", {"strategy": "tensor"}, "strategy must be 'group' or 'channel', got 'tensor'"),
        ("weights", {"strategy": "block", "block_structure": [128, 128]}, "block_structure must be absent"),
        ("weights", {"num_bits": 2}, "num_bits must be 8 or 4 or 3, got 2"),
        ("weights", {"num_bits": 4.0}, r"num_bits must be 8 or 4 or 3, got 4\.0"),
        ("weights", {"type": "float"}, "num_bits must be 8, got 4"),
        ("weights", {"type": "float", "num_bits": 8}, "fp8 weights have a scale per output row"),
        ("weights", {"group_size": -1}, "group size must be a multiple of 8, got -1"),
        ("weights", {"group_size": True}, "group_size must be an integer, got True"),
        ("weights", {"symmetric": 1}, "symmetric must be True or False, got 1"),
        ("weights", {"dynamic": True}, "dynamic must be False or None, got True"),
        ("weights", {"actorder": "sideways"}, "actorder must be .* got 'sideways'"),
        ("weights", {"bits": 4}, "unknown field 'bits'; did you mean 'num_bits'"),
        ("input_activations", {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor"},
         "strategy must be 'token', got 'tensor'"),
        ("input_activations", {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token"},
         "dynamic must be True, got nothing"),
        ("input_activations", {"num_bits": 8, "type": "float"}, "type must be 'int', got 'float'"),
        ("output_activations", {"num_bits": 8}, "output_activations must be absent"),
    ],
)  # fmt: skip
def test_groups_are_refused_by_field(where: str, changes: dict[str, Any], message: str) -> None:
    config = compressed()
    group = config["config_groups"]["group_0"]
    group[where] = {**(group[where] or {}), **changes}
    with pytest.raises(ModelError, match=message) as caught:
        parse_config(config)
    assert "config.json" in str(caught.value)


def test_formats_that_do_not_hold_the_weights_are_refused() -> None:
    for version in ("float-quantized",):
        config = compressed(format=version)
        config["config_groups"]["group_0"]["format"] = None
        with pytest.raises(ModelError, match="format must be one that holds int4_g128 weights"):
            parse_config(config)
    config = compressed()
    config["config_groups"]["group_0"]["targets"] = []
    with pytest.raises(ModelError, match="targets must be a list of layers"):
        parse_config(config)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "damp_percent": 0.1}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "GEMM"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**GPTQ, "bits": 2}, "bits must be 8 or 4 or 3, got 2"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format must be 'gptq' or .*, got 'marlin'"),
        ({**GPTQ, "chekpoint_format": "gptq_v2"}, "did you mean 'checkpoint_format'"),
        ({**GPTQ, "group_size": 0}, "group_size: group size must be a multiple of 8, got 0"),
        ({**GPTQ, "group_size": None}, "group_size must be an integer, got None"),
        ({**GPTQ, "sym": "yes"}, "sym must be True or False, got 'yes'"),
        ({**GPTQ, "lm_head": 1}, "lm_head must be"),
        ({**GPTQ, "pack_dtype": "int8"}, "pack_dtype must be 'int32'"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format must be absent"),
        ({**GPTQ, "dynamic": {"+:up": {"bits": 5}}}, "bits must be 8 or 4 or 3, got 5"),
        ({**GPTQ, "dynamic": {"+:up": {"rank": 5}}}, "unknown field 'rank'"),
        ({**GPTQ, "dynamic": ["up"]}, "dynamic must be an object"),
        ({**GPTQ, "modules_in_block_to_quantize": ["up"]}, "_to_quantize must be a list of lists"),
        ({**GPTQ, "modules_in_block_to_quantize": [["up", 1]]}, "_to_quantize must be a list of lists"),
        ({**GPTQ, "block_name_to_quantize": 1}, "block_name_to_quantize must be a name, got 1"),
        ({**AWQ, "version": "gemv"}, "version must be 'gemm' or 'GEMM' or None, got 'gemv'"),
        ({**AWQ, "version": "gemv_fast"}, "got 'gemv_fast'"),
        ({**AWQ, "version": "marlin"}, "got 'marlin'"),
        ({**AWQ, "bits": 8}, "bits must be 4, got 8"),
        ({**AWQ, "zero_point": None}, "zero_point must be True or False, got None"),
        ({**AWQ, "modules_to_not_convert": [1]}, "modules_to_not_convert must be a list of strings"),
        ({}, "say no quant_method"),
        (None, "quantization_config must be an object, got None"),
    ],
)  # fmt: skip
def test_gptq_and_awq_configs_are_refused_by_field(config: object, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_config(config)


def test_gptq_names_exceptions_and_parts_of_blocks() -> None:
    dynamic = {
        r"-:.*\.up_proj": {},
        r"+:.*\.down_proj": {"bits": 8, "group_size": 64},
        r".*k_proj": {"bits": 3},
    }
    scheme = parse_config({**GPTQ, "dynamic": dynamic})
    names = (NAME, UP, DOWN, "model.layers.0.self_attn.k_proj", "lm_head", "model.decoder.project_in")
    found = [None if fmt is None else fmt.name for fmt in map(scheme.format_of, names)]
    assert found == ["int4_g128", None, "int8_g64", "int3_g128", None, None]
    parts = [["self_attn.k_proj", "self_attn.q_proj"], ["mlp.down_proj"]]
    scheme = parse_config({**GPTQ, "modules_in_block_to_quantize": parts})
    assert [scheme.format_of(name) is not None for name in (NAME, UP, DOWN)] == [True, False, True]
    scheme = parse_config({**GPTQ, "block_name_to_quantize": "model.layers"})
    assert [scheme.format_of(name) is not None for name in (NAME, f"visual.{NAME}")] == [True, False]


def test_awq_leaves_out_what_contains_a_listed_name() -> None:
    scheme = parse_config({**AWQ, "modules_to_not_convert": ["gate", "visual"]})
    names = (NAME, "model.layers.0.mlp.gate", "visual.blocks.0.attn.q", "lm_head")
    assert [scheme.format_of(name) is not None for name in names] == [True, False, False, False]
