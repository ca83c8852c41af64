"""Stored size of each layer's weights, from a quantization_config of any method, loadable by kvq or not."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvq.errors import ModelError
from kvq.formats.checkpoints.config_groups import rules_of
from kvq.formats.checkpoints.fields import WHERE, Fields
from kvq.formats.checkpoints.flat_config import gptq_rules
from kvq.formats.checkpoints.scheme import IN_BLOCKS, QuantizationScheme, Rule, fitting
from kvq.formats.weights import WeightCode, WeightFormat


@dataclass(frozen=True, slots=True)
class Stored:
    """Stored form of a weight."""

    name: str
    weight_bytes: float  # without scales
    group: int | None = None  # weights that share a scale; None: an output row
    scale_bytes: float = 0  # of a scale and its zero point; 0: there are none

    @classmethod
    def of(cls, fmt: WeightFormat, scale_bytes: int = 2) -> "Stored":
        """Return the form in which kernels store a format; 3-bit codes are stored in 4 bits."""
        narrow = fmt.code in (WeightCode.INT4, WeightCode.INT3)
        return cls(fmt.name, 0.5 if narrow else 1, fmt.group_size, scale_bytes + (not fmt.symmetric))

    def num_scales(self, weights: int, rows: int) -> float:
        """Return the number of scales for `weights` weights in `rows` output rows."""
        each = weights / self.group if self.group else rows
        return each if self.scale_bytes else 0


NF4 = Stored("nf4", 0.5, 64, 1)
_NAMED = {  # by a pattern in a config's text about weights
    "mxfp4": Stored("mxfp4", 0.5, 32, 1),
    "mxfp6": Stored("mxfp6", 0.75, 32, 1),
    "mxfp8": Stored("mxfp8", 1, 32, 1),
    "fp4|float4": Stored("fp4", 0.5, 16, 1),
    "nf4": NF4,
    "fp8|float8|e4m3|e5m2": Stored("fp8", 1, None, 2),
}
_METHODS: dict[str, tuple[str, ...]] = {  # path to the form of weights, by method
    **dict.fromkeys(("auto-round", "intel/auto-round", "awq", "bitsandbytes", "inc"), ()),
    "hqq": ("quant_config", "weight_quant_params"),
    "modelopt": ("quant_algo",),
    "quanto": ("weights",),
    "quark": ("global_quant_config", "weight"),
    "torchao": ("quant_type", "default"),
}
_FIXED = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "mxfp4", "mxfp8": "mxfp8", "eetq": "int8"}
_KEPT = (
    "ignored_layers", "modules_to_not_convert", "exclude", "exclude_modules", "ignore", "skip_modules",
    "llm_int8_skip_modules",
)  # fmt: skip
_OWN = ("quantized_layers", "layer_quant_config", "extra_config")  # fields that describe layers by name
_BITS = ("num_bits", "bits", "w_bit", "nbits")
_TEXTS = ("quant_algo", "dtype", "weight_dtype", "_type", "weights")
_EXPERTS = re.compile(r".*\.experts\.")


def stored_layers(
    config: object, scheme: QuantizationScheme | None, scale_bytes: int
) -> Sequence[Rule[Stored]] | None:
    """Return rules from layer name patterns to stored forms (the first match applies), or None if unknown.

    `scheme`: the scheme, if kvq can load the config; each of its scales has `scale_bytes` bytes.
    """
    if scheme is not None and scheme.rules:
        forms = ((names, layer.fmt if layer else None) for names, layer in scheme.rules)
        return [(names, Stored.of(fmt, scale_bytes) if fmt else None) for names, fmt in forms]
    try:
        return _unread(Fields.of(config, WHERE))
    except ModelError:
        return None


def _unread(fields: Fields) -> list[Rule[Stored]] | None:
    """Return the rules for a config whose method or features kvq can't load, or None if they are unknown."""
    nested = fields.values.get("quantization")
    said = {**fields.values, **(nested if isinstance(nested, Mapping) else {})}
    method = str(said.get("quant_method", "bitsandbytes" if "load_in_4bit" in said else "")).lower()
    method = "modelopt" if method.startswith("modelopt") else method.removesuffix("_marlin")
    if "config_groups" in said:
        return rules_of(Fields(said), lambda group: _described(group.values.get("weights"), {}))
    if method == "gptq":
        return gptq_rules(Fields(said), lambda own: _described(own.values, {}))
    if method not in _METHODS and method not in _FIXED:
        return None
    path, describe = _METHODS.get(method, ()), partial(_described, beside=said)
    whole = describe(_FIXED[method] if method in _FIXED else _at(said, path))
    kept: list[Rule[Stored]] = [(_named(text), None) for key in _KEPT for text in Fields(said).strings(key)]
    own: list[Rule[Stored]] = [(_named(name), describe(_at(one, path))) for name, one in _layers(said, path)]
    if whole is None and not own:
        return None
    return [*kept, *own, (_EXPERTS if method == "mxfp4" else IN_BLOCKS, whole)]


def _at(said: object, path: tuple[str, ...]) -> object:
    """Return the value at the end of a path of keys; missing keys are skipped."""
    for key in path:
        said = said[key] if isinstance(said, Mapping) and key in said else said
    return said


def _layers(said: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, object]]:
    """Yield the layers that are described individually; in hqq, these replace a description of all layers."""
    for key in (*_OWN, *path[:1]):
        if isinstance(named := said.get(key), Mapping):
            yield from ((name, one) for name, one in named.items() if isinstance(one, Mapping))


def _named(text: str) -> re.Pattern[str]:
    """Return a layer name pattern from a regular expression or from parts of names with * as a wildcard."""
    if text.startswith("re:"):
        return fitting(text.removeprefix("re:"))
    words = ".*".join(map(re.escape, text.split("*")))
    return re.compile(rf"(?s:.*\.)?{fitting(words).pattern}(?:\..*)?\Z")


def _described(said: object, beside: Mapping[str, Any]) -> Stored | None:
    """Return the form described by a string or an object, or None if there is none or it has 16 bits."""
    values = {**beside, "quant_algo": said} if isinstance(said, str) else said
    if not isinstance(values, Mapping):
        return None
    for inner in ("_data", "quant_type_kwargs"):  # torchao's
        values = {**values, **(own if isinstance(own := values.get(inner), Mapping) else {})}
    if values.get("load_in_4bit"):
        return NF4 if values.get("bnb_4bit_use_double_quant") else replace(NF4, scale_bytes=4)
    bits = 8 if values.get("load_in_8bit") else _first(values, _BITS, int)
    text = _first(values, _TEXTS, str) or ""
    if bits is not None:
        text = f"{_first(values, ('type', 'data_type'), str) or 'int'}{bits}"
    text = text.lower().replace("_", "")
    if weight := re.search(r"((?:int|fp|float)\d+)weight", text):  # the rest is about inputs
        text = weight[1]
    group = _first(values, ("group_size", "q_group_size"), int) or 0
    for pattern, named in _NAMED.items():
        if re.search(pattern, text):
            return replace(named, group=group) if group > 0 else named
    number = re.search(r"(?:int|w)([2-8])(?!\d)", text)
    if number is None:
        return None
    has_zeros = bool(values.get("zero_point", not values.get("sym", values.get("symmetric", True))))
    name = f"int{number[1]}" + (f"_g{group}" if group > 0 else "") + ("_asym" if has_zeros else "")
    scale_bytes = 4 if "nbits" in values else 2 + has_zeros  # hqq's zero points have 16 bits
    return Stored(name, int(number[1]) / 8, group if group > 0 else None, scale_bytes)


def _first(values: Mapping[str, Any], names: tuple[str, ...], kind: type) -> Any:
    """Return the value of the first of these fields whose value has the type `kind`."""
    return next((values[name] for name in names if type(values.get(name)) is kind), None)
