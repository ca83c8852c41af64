"""Plans count what a checkpoint stores: its config says so, for the formats that kvq writes and reads."""

import json
from typing import Any

import pytest

import kvq
from kvq.errors import ConfigError
from kvq.models.describe.resolve import EMBEDDED
from kvq.sizing.held import HeldAs, held_as

CONFIG = json.loads((EMBEDDED["tiny"] / "config.json").read_text())
INT4 = {"quant_method": "gptq", "bits": 4, "group_size": 128}
LAYER = "model.layers.3.mlp.down_proj"


def held(said: object, dtype: str = "bfloat16") -> HeldAs:
    return held_as({"dtype": dtype, "quantization_config": said})


def grouped(weights: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """As llm-compressor writes it."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "ignore": ["lm_head"], "config_groups": {"a": group}} | more


WHOLE = {  # of a method's config, and what a weight takes with its share of a scale
    "gptq": (INT4, "int4_g128", 0.5 + 2 / 128),
    "gptq, asymmetric": (INT4 | {"sym": False}, "int4_g128_asym", 0.5 + 3 / 128),
    "gptq of 3 bits": (INT4 | {"bits": 3}, "int3_g128", 0.5 + 2 / 128),
    "gptq of 2 bits": (INT4 | {"bits": 2}, "int2_g128", 0.25 + 2 / 128),
    "gptq for marlin": (INT4 | {"quant_method": "gptq_marlin"}, "int4_g128", 0.5 + 2 / 128),
    "awq": (
        AWQ := {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True},
        "int4_g64_asym",
        0.5 + 3 / 64,
    ),
    "awq of another version": (AWQ | {"version": "gemv"}, "int4_g64_asym", 0.5 + 3 / 64),
    "awq, old names": ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, "int4_g64", 0.5 + 2 / 64),
    "fp8": ({"quant_method": "fp8"}, "fp8", 1),
    "fbgemm_fp8": ({"quant_method": "fbgemm_fp8"}, "fp8", 1),
    "int8 by compressed-tensors": (grouped({"num_bits": 8, "type": "int"}), "int8", 1),
    "nvfp4": (grouped({"num_bits": 4, "type": "float", "group_size": 16}), "fp4", 0.5 + 1 / 16),
    "mxfp4": (grouped({"num_bits": 4, "type": "float", "group_size": 32}), "fp4", 0.5 + 1 / 32),
    "modelopt fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8", 1),
    "modelopt nvfp4": (
        {"quant_method": "modelopt_fp4", "quant_algo": "NVFP4", "group_size": 16},
        "fp4",
        0.5 + 1 / 16,
    ),
    "modelopt w4a8": (
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ", "group_size": 128},
        "int4_g128",
        0.5 + 2 / 128,
    ),
    "modelopt nested": ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}, "fp8", 1),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "nf4", 0.5 + 4 / 64),
    "bitsandbytes, twice": ({"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, "nf4", 0.5 + 1 / 64),
    "bitsandbytes int8": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False},
        "int8",
        1,
    ),
    "hqq": (
        {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}}},
        "int4_g64",
        0.5 + 4 / 64,
    ),
    "torchao": (
        {
            "quant_method": "torchao",
            "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 128}}},
        },
        "int4_g128",
        0.5 + 2 / 128,
    ),
    "torchao in a word": (
        {
            "quant_method": "torchao",
            "quant_type": "int8_dynamic_activation_int4_weight",
            "quant_type_kwargs": {"group_size": 32},
        },
        "int4_g32",
        0.5 + 2 / 32,
    ),
    "torchao fp8": (
        {
            "quant_method": "torchao",
            "quant_type": {"default": {"_type": "Float8WeightOnlyConfig", "_data": {}}},
        },
        "fp8",
        1,
    ),
    "quark": (
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}}},
        "fp4",
        0.5 + 1 / 32,
    ),
    "quark int8": (
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int8"}}},
        "int8",
        1,
    ),
    "auto-round": (
        {"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "mx_fp"},
        "mxfp4",
        0.5 + 1 / 32,
    ),
    "quanto": ({"quant_method": "quanto", "weights": "int8"}, "int8", 1),
    "eetq": ({"quant_method": "eetq", "weights": "int8"}, "int8", 1),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_method_takes_what_its_config_says(name: str) -> None:
    said, form, each = WHOLE[name]
    found = held(said).of(LAYER)
    share = found.scale_bytes / found.group if found.group else 0
    assert (found.name, found.weight_bytes + share) == (form, pytest.approx(each))
    assert held(said).of("lm_head").name == "bf16"
    assert held(said).unknown is None


@pytest.mark.parametrize(
    "said",
    [
        {"quant_method": "exotic", "bits": 4},
        {"quant_method": "hqq"},
        "x",
        grouped(None, config_groups={}),
        {},
    ],
)
def test_what_nobody_knows_is_held_as_the_rest_and_named(said: Any) -> None:
    found = held(said)
    assert found.of(LAYER).name == "bf16"
    assert found.unknown == str(said.get("quant_method") if isinstance(said, dict) else None)
    assert found.unread is not None


ATTENTION, GATE = "model.layers.3.self_attn.q_proj", "model.layers.3.mlp.gate_proj"
W4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
W8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
MIXED = {
    "a": {
        "targets": ["re:.*self_attn.*"],
        "weights": W8,
        "input_activations": None,
        "format": "naive-quantized",
    },
    "b": {"targets": [GATE], "weights": W4, "input_activations": None, "format": "pack-quantized"},
}
PARTS = {  # of a method's config, and what attention, a gate and the head are in
    "ignored by pattern": (
        grouped(W4, format="pack-quantized", ignore=["re:.*self_attn.*"]),
        "bf16 int4_g128 int4_g128",
    ),
    "ignored by name": (
        grouped(W4, format="pack-quantized", ignore=["lm_head", GATE]),
        "int4_g128 bf16 bf16",
    ),
    "several groups": (grouped(None, format="mixed-precision", config_groups=MIXED), "fp8 int4_g128 bf16"),
    "groups that kvq doesn't read": (
        grouped({"num_bits": 4, "type": "float", "group_size": 16}, ignore=["lm_head", "re:.*self_attn"]),
        "bf16 fp4 bf16",
    ),
    "gptq, dynamic": (
        INT4 | {"dynamic": {"-:.*attn.*": {}, "+:.*gate.*": {"bits": 8}}},
        "bf16 int8_g128 bf16",
    ),
    "gptq with a head": (INT4 | {"lm_head": True}, "int4_g128 int4_g128 int4_g128"),
    "gptq of some parts": (
        INT4 | {"modules_in_block_to_quantize": [["mlp.gate_proj"]]},
        "bf16 int4_g128 bf16",
    ),
    "awq": (AWQ | {"version": "gemm", "modules_to_not_convert": ["self_attn"]}, "bf16 int4_g64_asym bf16"),
    "awq of another version": (
        AWQ | {"version": "gemv", "modules_to_not_convert": ["self_attn"]},
        "bf16 int4_g64_asym bf16",
    ),
    "fp8": ({"quant_method": "fp8", "ignored_layers": [GATE]}, "fp8 bf16 bf16"),
    "fp8, all of a layer": (
        {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.30"]},
        "fp8 fp8 bf16",
    ),
    "fbgemm_fp8": (
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head", "mlp"]},
        "fp8 bf16 bf16",
    ),
    "modelopt": (
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "exclude_modules": ["lm_head", "model.layers.*.self_attn*"],
        },
        "bf16 fp4 bf16",
    ),
    "modelopt, mixed": (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {GATE: {"quant_algo": "FP8"}},
        },
        "bf16 fp8 bf16",
    ),
    "bitsandbytes": ({"load_in_4bit": True, "llm_int8_skip_modules": ["self_attn"]}, "bf16 nf4 bf16"),
    "hqq by layer": (
        {
            "quant_method": "hqq",
            "quant_config": {"self_attn.q_proj": {"weight_quant_params": {"nbits": 8, "group_size": 64}}},
        },
        "int8_g64 bf16 bf16",
    ),
    "quark": (
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": {"dtype": "fp4"}},
            "layer_quant_config": {"*self_attn*": {"weight": {"dtype": "fp8_e4m3"}}},
        },
        "fp8 fp4 bf16",
    ),
    "auto-round": (
        {"quant_method": "auto-round", "bits": 4, "group_size": 128, "extra_config": {GATE: {"bits": 16}}},
        "int4_g128 bf16 bf16",
    ),
    "gpt-oss": (
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
        "bf16 bf16 bf16",
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_layers_that_a_method_leaves_out_or_stores_otherwise_are_told_apart(name: str) -> None:
    said, forms = PARTS[name]
    found = held(said)
    assert " ".join(found.of(layer).name for layer in (ATTENTION, GATE, "lm_head")) == forms


def test_experts_are_packed_for_engines_that_read_them() -> None:
    gpt_oss = held({"quant_method": "mxfp4"})
    assert gpt_oss.has_packed_experts, "kvq does not load it: this is of an engine that does"
    assert gpt_oss.of("model.layers.0.mlp.experts.0.down_proj").name == "mxfp4"
    assert not held(INT4).has_packed_experts, "kvq's engine has them in 16 bits"


def test_scales_have_the_type_of_the_rest_where_the_format_says_so() -> None:
    groups = grouped(W4, format="pack-quantized")
    for dtype, said, each in (("float32", groups, 4), ("bfloat16", groups, 2), ("float32", INT4, 2)):
        assert held(said, dtype).of(LAYER).scale_bytes == each


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({"torch_dtype": "float32"}, "fp32"),  # as older transformers wrote it
        ({"dtype": "float16"}, "fp16"),
        ({"dtype": "torch.bfloat16"}, "bf16"),
        ({}, "bf16"),
    ],
)
def test_the_rest_is_held_as_it_is_stored(said: dict[str, str], name: str) -> None:
    assert (held_as(said).of(LAYER).name, held_as(said).other.name) == (name, name)
    assert held_as(said, "int4").other.name == name, "only Linear layers are rounded"


def test_a_format_that_is_unknown_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="got 'int5'; did you mean 'int"):
        held_as({}, "int5")
    assert held_as({}, "int4_g64").of(LAYER).group == 64, "any of our formats"


def test_a_quantized_folder_plans_for_its_own_weights(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": INT4}))
    own, named, plain = (
        kvq.plan(folder, gpu="l4", kv="int4", context=1024, **more).weights_bytes
        for folder, more in (
            (tmp_path, {}),
            (EMBEDDED["tiny"], {"weights": "int4_g128"}),
            (EMBEDDED["tiny"], {}),
        )
    )
    assert own == named < plain
