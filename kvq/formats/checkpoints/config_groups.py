"""The quantization_config of compressed-tensors: layer schemes by target, ignored layers, and KV scales.

Source: the compressed-tensors package, version 0.20, folder `quantization`: `quant_config.py`,
`quant_scheme.py` and `quant_args.py`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvq.errors import ConfigError, ModelError
from kvq.formats.checkpoints import scheme
from kvq.formats.checkpoints.fields import Fields
from kvq.formats.checkpoints.scheme import Layer, Rule
from kvq.formats.weights import INTEGER_CODES, Inputs, WeightCode, WeightFormat

METHOD = "compressed-tensors"
PACKED = "pack-quantized"
INT = "int-quantized"  # D180: W4A8 is stored as bytes, as in vLLM
FLOAT = "float-quantized"
NAIVE = "naive-quantized"  # the package's name for weight-only FP8
_MIXED = "mixed-precision"
_VERSIONS = (PACKED, INT, FLOAT, NAIVE)
_FIELDS = (
    "quant_method", "format", "config_groups", "ignore", "kv_cache_scheme", "sparsity_config",
    "transform_config", "moe_sparsity_config", "quantization_status", "global_compression_ratio", "version",
)  # fmt: skip
_HARMLESS = ("run_compressed", "dequantize", "use_optimized_inference")
_ARGS = (
    "num_bits", "type", "symmetric", "strategy", "group_size", "dynamic", "actorder", "block_structure",
    "scale_dtype", "zp_dtype", "observer", "observer_kwargs",
)  # fmt: skip
_GROUP = ("targets", "weights", "input_activations", "output_activations", "format")
_ORDERED = ("group", "dynamic")  # values of actorder with groups of scattered inputs on disk
_CODES = {("int", bits): code for bits, code in INTEGER_CODES.items()} | {("float", 8): WeightCode.FP8}
_KV_SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


def version_of(fmt: WeightFormat) -> str:
    """Return the name of the compressor that writes weights in this format."""
    if fmt.code is WeightCode.FP8:
        return NAIVE if fmt.inputs is Inputs.FULL else FLOAT
    return PACKED if fmt.inputs is Inputs.FULL else INT  # vLLM stores W4A8's nibbles as bytes, too


def dump(formats: Mapping[str, WeightFormat], ignore: Sequence[str], *, kv_scales: bool) -> dict[str, Any]:
    """Return the config for layers in these formats; with several formats, each group lists its layers."""
    kinds = list(dict.fromkeys(formats.values()))
    versions = {version_of(fmt) for fmt in kinds}
    groups = {}
    for i, fmt in enumerate(kinds):
        named = [name for name, own in formats.items() if own == fmt]
        groups[f"group_{i}"] = _dump_group(fmt, ["Linear"] if len(kinds) == 1 else named)
    return {
        "quant_method": METHOD,
        "format": versions.pop() if len(versions) == 1 else _MIXED,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignore),
        "kv_cache_scheme": dict(_KV_SCHEME) if kv_scales else None,
    }


def parse(fields: Fields) -> scheme.QuantizationScheme:
    """Parse the config; see `kvq.formats.checkpoints.parse_config`."""
    fields.no_typos(_FIELDS, _HARMLESS)
    fields.absent("transform_config", "moe_sparsity_config")
    if fields.values.get("sparsity_config") not in (None, {}):
        fields.object("sparsity_config").choice("format", ("dense",), "dense")
    version = fields.choice("format", (*_VERSIONS, _MIXED))
    fields.choice("quantization_status", ("compressed", "frozen", None), None)
    rules = rules_of(fields, lambda group: _group(group, version))
    if has_scales := fields.values.get("kv_cache_scheme") is not None:
        _check_args(fields.object("kv_cache_scheme"), _KV_SCHEME)
    return scheme.QuantizationScheme(file_format=METHOD, version=version, rules=rules, kv_scales=has_scales)


def rules_of(fields: Fields, read: Callable[[Fields], Layer | None]) -> list[Rule[Layer]]:
    """Return the rules for ignored layers, then for groups: names, then patterns, then all layers.

    `read`: function that returns the description of a group's layers, or None if they stay unquantized.
    """
    named = fields.object("config_groups")
    if not named.values:
        raise named.refusal("group_0", "there: config_groups is empty")
    rules: list[Rule[Layer]] = [(_target(text, fields.where), None) for text in fields.strings("ignore")]
    found: list[tuple[int, Rule[Layer]]] = []
    for group in map(named.object, named.values):
        layer, targets = read(group), group.strings("targets")
        if not targets:
            raise group.refusal("targets", "a list of layers")
        for text in targets:
            rank = 2 if text == "Linear" else int(text.startswith("re:"))
            found.append((rank, (_target(text, group.where), layer)))
    return rules + [rule for _, rule in sorted(found, key=lambda pair: pair[0])]


def _dump_group(fmt: WeightFormat, targets: list[str]) -> dict[str, Any]:
    kind = "float" if fmt.code is WeightCode.FP8 else "int"
    weights = {
        "num_bits": fmt.code.bits,
        "type": kind,
        "symmetric": fmt.symmetric,
        "strategy": "channel" if fmt.group_size is None else "group",
        "group_size": fmt.group_size,
        "dynamic": False,
    }
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": None if fmt.inputs is Inputs.FULL else _token_inputs(kind),
        "output_activations": None,
        "format": version_of(fmt),
    }


def _group(group: Fields, version: str) -> scheme.LayerScheme:
    """Return the stored form of a group's layers."""
    group.only(_GROUP)
    group.absent("output_activations")
    weights = group.object("weights")
    fmt = _weight_format(weights, group)
    if version == _MIXED or group.values.get("format") is not None:
        version = group.choice("format", _VERSIONS)
    packed, is_float = version == PACKED, fmt.code is WeightCode.FP8
    if (is_float and version in (PACKED, INT)) or (not is_float and version == FLOAT):
        raise group.refusal("format", f"one that holds {fmt.name} weights (the one in force is {version!r})")
    act_order = weights.values.get("actorder") in _ORDERED
    if act_order and not packed:
        raise weights.refusal("actorder", "null outside pack-quantized")
    suffixes = ["weight_packed", "weight_scale", "weight_shape"] if packed else ["weight", "weight_scale"]
    suffixes += ["weight_zero_point"] * (not fmt.symmetric) + ["weight_g_idx"] * act_order
    return scheme.LayerScheme(fmt=fmt, version=version, suffixes=tuple(suffixes))


def _weight_format(weights: Fields, group: Fields) -> WeightFormat:
    weights.only(_ARGS)
    weights.absent("block_structure")
    weights.choice("dynamic", (False, None), False)
    weights.choice("actorder", (None, False, "weight", "static", *_ORDERED), None)
    kind = weights.choice("type", ("int", "float"))
    bits = weights.choice("num_bits", [width for own, width in _CODES if own == kind])
    symmetric = weights.choice("symmetric", (True, False))
    size = None
    if weights.choice("strategy", ("group", "channel")) == "group":
        size = weights.number("group_size")
    else:
        weights.choice("group_size", (None, -1), None)
    try:
        return WeightFormat(
            code=_CODES[kind, bits], group_size=size, symmetric=symmetric, inputs=_inputs(group, kind)
        )
    except ConfigError as error:
        raise ModelError(f"{weights.where}: {error}") from error


def _inputs(group: Fields, kind: str) -> Inputs:
    if group.values.get("input_activations") is None:
        return Inputs.FULL
    _check_args(group.object("input_activations"), _token_inputs(kind))
    return Inputs.FP8 if kind == "float" else Inputs.INT8


def _target(text: str, where: str) -> re.Pattern[str]:
    if text.startswith("re:"):
        return scheme.fitting(text.removeprefix("re:"))
    if text == "Linear":
        return scheme.EVERY
    if text in ("Embedding", "Conv2d", "Attention"):
        raise ModelError(
            f"{where}: targets must be Linear layers, by class, name or re:pattern, got {text!r}"
        )
    return scheme.exactly(text)


def _token_inputs(kind: str) -> dict[str, Any]:
    """Return the scheme for inputs that are quantized token by token."""
    return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}


def _check_args(args: Fields, wanted: Mapping[str, Any]) -> None:
    """Raise ModelError unless a quantization scheme has exactly these arguments."""
    args.only(_ARGS)
    args.absent("block_structure", "actorder", "group_size")
    for name, value in wanted.items():
        args.choice(name, (value,))
