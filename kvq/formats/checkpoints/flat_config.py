"""The quantization_config of GPTQ and AWQ checkpoints: one format for all layers, with exceptions.

Source: AutoGPTQ 0.7, `auto_gptq/quantization/config.py`; GPTQModel, `gptqmodel/quantization/config.py`;
AutoAWQ 0.2.9, `awq/models/_config.py`.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvq.errors import ConfigError, ModelError
from kvq.formats.checkpoints import scheme
from kvq.formats.checkpoints.fields import Fields
from kvq.formats.checkpoints.scheme import Layer, QuantizationScheme
from kvq.formats.weights import INTEGER_CODES, WeightCode, WeightFormat

V1 = "gptq"  # zero points are stored minus 1
V2 = "gptq_v2"  # zero points are stored unchanged
GEMM = "gemm"
GPTQ_SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")
AWQ_SUFFIXES = ("qweight", "qzeros", "scales")
_GPTQ = (
    "quant_method", "bits", "group_size", "sym", "desc_act", "checkpoint_format", "format", "lm_head",
    "dynamic", "pack_dtype", "modules_in_block_to_quantize", "block_name_to_quantize",
)  # fmt: skip
_AWQ = ("quant_method", "bits", "group_size", "zero_point", "version", "format", "modules_to_not_convert")
_OVERRIDES = ("bits", "group_size", "sym", "desc_act")


def dump_gptq(
    fmt: WeightFormat, layers: Sequence[str], ignore: Sequence[str], *, act_order: bool
) -> dict[str, Any]:
    """Return the config of a symmetric GPTQ checkpoint, version 1."""
    skipped = [name for name in ignore if name != "lm_head"]
    config: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": fmt.code.bits,
        "group_size": -1 if fmt.group_size is None else fmt.group_size,
        "sym": True,
        "desc_act": act_order,
        "checkpoint_format": V1,
        "lm_head": "lm_head" in layers,
    }
    if skipped:
        config["dynamic"] = {f"-:^{re.escape(name)}$": {} for name in skipped}
    return config


def parse_gptq(fields: Fields) -> QuantizationScheme:
    """Parse the config of a GPTQ checkpoint; see `kvq.formats.checkpoints.parse_config`."""
    fields.no_typos(_GPTQ)
    fields.absent("is_marlin_format")
    fields.choice("pack_dtype", ("int32", None), None)
    fields.choice("format", (V1, V2, None), None)
    fields.choice("checkpoint_format", (V1, V2, None), None)
    version = fields.values.get("checkpoint_format") or fields.values.get("format") or V1
    rules = gptq_rules(fields, partial(_gptq_layer, version=version))
    return QuantizationScheme(file_format="autogptq", version=version, rules=rules)


def gptq_rules(fields: Fields, read: Callable[[Fields], Layer]) -> list[scheme.Rule[Layer]]:
    """Return the rules for exceptions, the head and layers in blocks; `read` describes layers by fields."""
    layer, rules = read(fields), _dynamic(fields, read)
    head = fields.choice("lm_head", (True, False, None), False)
    rules.append((scheme.ending("lm_head"), layer if head else None))
    chosen = [scheme.ending(part) for part in _parts(fields)] or [_in_blocks(fields)]
    return [*rules, *((names, layer) for names in chosen)]


def dump_awq(fmt: WeightFormat, ignore: Sequence[str]) -> dict[str, Any]:
    """Return the config of an AWQ checkpoint, version GEMM, with zero points even if all of them are zero."""
    return {
        "quant_method": "awq",
        "bits": fmt.code.bits,
        "group_size": -1 if fmt.group_size is None else fmt.group_size,
        "zero_point": True,
        "version": GEMM,
        "modules_to_not_convert": list(ignore) or None,
    }


def parse_awq(fields: Fields) -> QuantizationScheme:
    """Parse the config of an AWQ checkpoint; see `kvq.formats.checkpoints.parse_config`."""
    fields.no_typos(_AWQ)
    for name in ("version", "format"):
        fields.choice(name, (GEMM, GEMM.upper(), None), None)
    fields.choice("bits", (4,))
    fmt = _format(fields, WeightCode.INT4, symmetric=not fields.choice("zero_point", (True, False)))
    layer = scheme.LayerScheme(fmt=fmt, version=GEMM, suffixes=AWQ_SUFFIXES)
    kept = [(scheme.containing(part), None) for part in fields.strings("modules_to_not_convert")]
    return QuantizationScheme(file_format="autoawq", version=GEMM, rules=[*kept, (scheme.IN_BLOCKS, layer)])


def _gptq_layer(fields: Fields, version: str) -> scheme.LayerScheme:
    fields.choice("desc_act", (True, False, None), False)
    code = INTEGER_CODES[fields.choice("bits", tuple(INTEGER_CODES))]
    fmt = _format(fields, code, symmetric=fields.choice("sym", (True, False), True))
    return scheme.LayerScheme(fmt=fmt, version=version, suffixes=GPTQ_SUFFIXES)


def _format(fields: Fields, code: WeightCode, *, symmetric: bool) -> WeightFormat:
    size = fields.number("group_size")
    try:
        return WeightFormat(code=code, group_size=None if size == -1 else size, symmetric=symmetric)
    except ConfigError as error:
        raise ModelError(f"{fields.where}: group_size: {error}") from error


def _dynamic(fields: Fields, read: Callable[[Fields], Layer]) -> list[scheme.Rule[Layer]]:
    """Return GPTQModel's exceptions: `-:pattern` excludes layers, `+:pattern` or `pattern` sets fields."""
    if fields.values.get("dynamic") is None:
        return []
    dynamic, rules = fields.object("dynamic"), []
    for pattern, change in dynamic.values.items():
        layer = None
        if not pattern.startswith("-:"):
            own = Fields.of(change, f"{dynamic.where}.{pattern}")
            own.only(_OVERRIDES)
            layer = read(Fields({**fields.values, **own.values}, own.where))
        rules.append((scheme.fitting(pattern.removeprefix("-:").removeprefix("+:")), layer))
    return rules


def _parts(fields: Fields) -> list[str]:
    """Return the suffixes of the names of quantized layers, if the config lists any."""
    listed = fields.values.get("modules_in_block_to_quantize")
    if listed is None:
        return []
    is_nested = isinstance(listed, list) and all(isinstance(some, list) for some in listed)
    flat = [part for some in listed for part in some] if is_nested else []
    if not flat or not all(isinstance(part, str) for part in flat):
        raise fields.refusal("modules_in_block_to_quantize", "a list of lists of names")
    return flat


def _in_blocks(fields: Fields) -> re.Pattern[str]:
    """Return a pattern for the layers in all blocks, or in the block list that the config names."""
    name = fields.values.get("block_name_to_quantize")
    if name is None:
        return scheme.IN_BLOCKS
    if not isinstance(name, str):
        raise fields.refusal("block_name_to_quantize", "a name")
    return scheme.fitting(rf"{re.escape(name)}\.\d+\..*")
