"""What a config.json says of its checkpoint's weights, in the names that plans count with."""

from collections.abc import Mapping
from typing import Any

AUTO = "auto"
_UNQUANTIZED = "fp16"
_INTEGERS = {8: "int8", 4: "int4", 3: "int3"}


def stored_weights(config: Mapping[str, Any]) -> str:
    """The format of the linear layers: of a quantized checkpoint its own, else fp16.

    Of several formats the first that the config lists; a method that isn't known counts as fp16.
    """
    said = config.get("quantization_config")
    if not isinstance(said, Mapping):
        return _UNQUANTIZED
    groups = said.get("config_groups")
    if isinstance(groups, Mapping) and groups:
        first = next(iter(groups.values()))
        weights = first.get("weights") if isinstance(first, Mapping) else None
        if isinstance(weights, Mapping):
            return "fp8" if weights.get("type") == "float" else _of_bits(weights.get("num_bits"))
    if said.get("quant_method") == "fp8":
        return "fp8"
    if said.get("load_in_4bit"):
        return "nf4"
    return "int8" if said.get("load_in_8bit") else _of_bits(said.get("bits"))


def _of_bits(bits: object) -> str:
    return _INTEGERS.get(bits, _UNQUANTIZED) if isinstance(bits, int) else _UNQUANTIZED
