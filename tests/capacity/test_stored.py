"""Plans count what a checkpoint stores: its config says so, for the formats that kvq writes and reads."""

import json

import pytest
from kvq.capacity.plan.stored import stored_weights

import kvq
from kvq.models.resolve import EMBEDDED

CONFIG = json.loads((EMBEDDED["tiny"] / "config.json").read_text())


@pytest.mark.parametrize(
    ("said", "name"),
    [
        (None, "fp16"),
        ({"quant_method": "gptq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 3}, "int3"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "nf4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, "int8"),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int"}}}}, "int8"),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}}, "fp8"),
        ({"config_groups": {"group_0": None}, "bits": "x"}, "fp16"),
        ({"quant_method": "hqq"}, "fp16"),
        ("x", "fp16"),
    ],
)
def test_the_format_is_read_from_the_config(said: object, name: str) -> None:
    assert stored_weights({"quantization_config": said}) == name


def test_a_quantized_folder_plans_for_its_own_weights(tmp_path) -> None:
    said = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": said}))
    own, named, plain = (
        kvq.plan(folder, gpu="l4", kv="int4", context=1024, **more).weights_bytes
        for folder, more in ((tmp_path, {}), (EMBEDDED["tiny"], {"weights": "int4"}), (EMBEDDED["tiny"], {}))
    )
    assert own == named < plain
