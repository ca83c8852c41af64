"""Plans count what a checkpoint stores: its config says so, for the formats that kvq writes and reads."""

import json

import pytest

import kvq
from kvq.errors import ConfigError
from kvq.formats.weights import WeightFormat
from kvq.models.resolve import EMBEDDED
from kvq.sizing.held import held_as

CONFIG = json.loads((EMBEDDED["tiny"] / "config.json").read_text())
INT4 = {"quant_method": "gptq", "bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    ("said", "name", "scales"),
    [
        (None, "bf16", 0),
        (INT4, "int4_g128", 2),
        (INT4 | {"sym": False}, "int4_g128_asym", 3),
        ({"quant_method": "gptq", "bits": 3}, "int3_channel", 2),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, "int4_g64_asym", 3),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": False}, "int4_g64", 2),
        ({"quant_method": "fp8"}, "fp8", 2),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "nf4", 1),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, "int8", 2),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int"}}}}, "int8", 2),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}}, "fp8", 2),
        ({"config_groups": {"group_0": None}, "bits": "x"}, "bf16", 0),
        ({"quant_method": "hqq"}, "bf16", 0),
        ("x", "bf16", 0),
    ],
)
def test_the_format_is_read_from_the_config(said: object, name: str, scales: int) -> None:
    held = held_as({"dtype": "bfloat16", "quantization_config": said})
    assert held.name == name
    if scales:
        assert held.each_scale_bytes == scales


def test_scales_have_the_type_of_the_rest_where_the_format_says_so() -> None:
    groups = {"config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 64}}}}
    for dtype, said, each in (("float32", groups, 4), ("bfloat16", groups, 2), ("float32", INT4, 2)):
        assert held_as({"dtype": dtype, "quantization_config": said}).each_scale_bytes == each


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
    assert (held_as(said).name, held_as(said).other) == (name, name)
    assert held_as(said, "int4").other == name, "only Linear layers are rounded"


def test_a_format_that_is_unknown_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="got 'int5'; did you mean 'int"):
        held_as({}, "int5")
    assert isinstance(held_as({}, "int4_g64").linear, WeightFormat), "any of our formats"


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
