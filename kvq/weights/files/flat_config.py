"""The quantization_config of GPTQ and AWQ checkpoints: one format for all layers, with exceptions.

Source: AutoGPTQ 0.7, `auto_gptq/quantization/config.py`; GPTQModel, `gptqmodel/quantization/config.py`;
AutoAWQ 0.2.9, `awq/models/_config.py`.
"""

import re
from collections.abc import Sequence
from typing import Any

from kvq.errors import ConfigError, ModelError
from kvq.formats.weights import INTEGER_CODES, WeightCode, WeightFormat
from kvq.weights.files import awq, gptq
from kvq.weights.files.fields import Fields
from kvq.weights.files.scheme import LayerScheme, QuantizationScheme, Rule, containing, ending, fitting

_IN_BLOCKS = r"(.*\.)?\d+\..*"  # layers outside of the numbered blocks keep their weights
_GPTQ = (
    "quant_method", "bits", "group_size", "sym", "desc_act", "checkpoint_format", "format", "lm_head",
    "dynamic", "pack_dtype", "modules_in_block_to_quantize", "block_name_to_quantize",
)  # fmt: skip
_AWQ = ("quant_method", "bits", "group_size", "zero_point", "version", "format", "modules_to_not_convert")
_OVERRIDES = ("bits", "group_size", "sym", "desc_act")


def dump_gptq(
    fmt: WeightFormat, layers: Sequence[str], ignore: Sequence[str], *, act_order: bool
) -> dict[str, Any]:
    """The config of a GPTQ checkpoint, version 1, symmetric."""
    skipped = [name for name in ignore if name != "lm_head"]
    config: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": fmt.code.bits,
        "group_size": -1 if fmt.group_size is None else fmt.group_size,
        "sym": True,
        "desc_act": act_order,
        "checkpoint_format": gptq.V1,
        "lm_head": "lm_head" in layers,
    }
    if skipped:
        config["dynamic"] = {f"-:^{re.escape(name)}$": {} for name in skipped}
    return config


def parse_gptq(fields: Fields) -> QuantizationScheme:
    """Read the config of a GPTQ checkpoint; see `kvq.weights.files.parse_config`."""
    fields.no_typos(_GPTQ)
    fields.absent("is_marlin_format")
    fields.choice("pack_dtype", ("int32", None), None)
    fields.choice("format", (gptq.V1, gptq.V2, None), None)
    fields.choice("checkpoint_format", (gptq.V1, gptq.V2, None), None)
    version = fields.values.get("checkpoint_format") or fields.values.get("format") or gptq.V1
    layer = _gptq_layer(fields, version)
    rules = _dynamic(fields, version)
    head = fields.choice("lm_head", (True, False, None), False)
    rules.append(Rule(ending("lm_head"), layer if head else None))
    parts = _parts(fields)
    rules += [Rule(ending(part), layer) for part in parts]
    if not parts:
        rules.append(Rule(_in_blocks(fields), layer))
    return QuantizationScheme(file_format="autogptq", version=version, rules=tuple(rules))


def dump_awq(fmt: WeightFormat, ignore: Sequence[str]) -> dict[str, Any]:
    """The config of an AWQ checkpoint, version GEMM, with zero points also where they are all zero."""
    return {
        "quant_method": "awq",
        "bits": fmt.code.bits,
        "group_size": -1 if fmt.group_size is None else fmt.group_size,
        "zero_point": True,
        "version": awq.GEMM,
        "modules_to_not_convert": list(ignore) or None,
    }


def parse_awq(fields: Fields) -> QuantizationScheme:
    """Read the config of an AWQ checkpoint; see `kvq.weights.files.parse_config`."""
    fields.no_typos(_AWQ)
    for name in ("version", "format"):
        fields.choice(name, (awq.GEMM, awq.GEMM.upper(), None), None)
    fields.choice("bits", (4,))
    fmt = _format(fields, WeightCode.INT4, symmetric=not fields.choice("zero_point", (True, False)))
    rules = [Rule(containing(part), None) for part in fields.strings("modules_to_not_convert")]
    rules.append(Rule(fitting(_IN_BLOCKS), LayerScheme(fmt=fmt, version=awq.GEMM, suffixes=awq.SUFFIXES)))
    return QuantizationScheme(file_format="autoawq", version=awq.GEMM, rules=tuple(rules))


def _gptq_layer(fields: Fields, version: str) -> LayerScheme:
    fields.choice("desc_act", (True, False, None), False)
    code = INTEGER_CODES[fields.choice("bits", tuple(INTEGER_CODES))]
    fmt = _format(fields, code, symmetric=fields.choice("sym", (True, False), True))
    return LayerScheme(fmt=fmt, version=version, suffixes=gptq.SUFFIXES)


def _format(fields: Fields, code: WeightCode, *, symmetric: bool) -> WeightFormat:
    size = fields.number("group_size")
    try:
        return WeightFormat(code=code, group_size=None if size == -1 else size, symmetric=symmetric)
    except ConfigError as error:
        raise ModelError(f"{fields.where}: group_size: {error}") from error


def _dynamic(fields: Fields, version: str) -> list[Rule]:
    """GPTQModel's exceptions: `-:pattern` leaves layers out, `+:pattern` or `pattern` changes fields."""
    if fields.values.get("dynamic") is None:
        return []
    dynamic, rules = fields.object("dynamic"), []
    for pattern, change in dynamic.values.items():
        target = fitting(pattern.removeprefix("-:").removeprefix("+:"))
        if pattern.startswith("-:"):
            rules.append(Rule(target, None))
            continue
        own = Fields.of(change, f"{dynamic.where}.{pattern}")
        own.only(_OVERRIDES)
        merged = Fields({**fields.values, **own.values}, own.where)
        rules.append(Rule(target, _gptq_layer(merged, version)))
    return rules


def _parts(fields: Fields) -> list[str]:
    """Ends of the names of quantized layers, where the config lists them."""
    listed = fields.values.get("modules_in_block_to_quantize")
    if listed is None:
        return []
    is_nested = isinstance(listed, list) and all(isinstance(some, list) for some in listed)
    flat = [part for some in listed for part in some] if is_nested else []
    if not flat or not all(isinstance(part, str) for part in flat):
        raise fields.refusal("modules_in_block_to_quantize", "a list of lists of names")
    return flat


def _in_blocks(fields: Fields) -> re.Pattern[str]:
    """The layers of all blocks, or of the list of blocks that the config names."""
    name = fields.values.get("block_name_to_quantize")
    if name is None:
        return fitting(_IN_BLOCKS)
    if not isinstance(name, str):
        raise fields.refusal("block_name_to_quantize", "a name")
    return fitting(rf"{re.escape(name)}\.\d+\..*")
