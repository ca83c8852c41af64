"""In which types an engine holds a model's weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvq.errors import ConfigError, nearest
from kvq.formats.weights import INTEGER_CODES, WeightCode, WeightFormat, parse_weight_format
from kvq.sizing.parameters import Parameters

AUTO = "auto"
_PLAIN_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_NF4 = "nf4"
_NF4_BLOCK = 64  # weights that share a scale of 8 bits
NAMES = (*_PLAIN_BYTES, "fp8", "int8", "int4", "int3", _NF4)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldAs:
    """What Linear layers, the head, and everything else is held in.

    `linear`: a plain type, "nf4", or a format of codes. `head`: of a head that is no embedding too; None for
    as the rest; a format rounds a tied one apart from its embedding. `scale_bytes`: of one scale.
    """

    linear: str | WeightFormat
    other: str = "fp16"
    head: str | WeightFormat | None = None
    scale_bytes: int = 2

    @property
    def name(self) -> str:
        """Of what Linear layers are held in."""
        return self.linear if isinstance(self.linear, str) else self.linear.name

    @property
    def code_bytes(self) -> float:
        """Of a weight of a Linear layer, without scales."""
        if isinstance(self.linear, WeightFormat):
            return _code_bytes(self.linear)
        return 0.5 if self.linear == _NF4 else _PLAIN_BYTES[self.linear]

    @property
    def other_bytes(self) -> int:
        """Of a value of the rest."""
        return _PLAIN_BYTES[self.other]

    @property
    def each_scale_bytes(self) -> float:
        """Of a scale and the zero point beside it."""
        if isinstance(self.linear, WeightFormat):
            return self.scale_bytes + (0 if self.linear.symmetric else 1)
        return 1

    def num_scales(self, parameters: Parameters) -> float:
        """Of all Linear layers."""
        if self.linear == _NF4:
            return parameters.linear / _NF4_BLOCK
        if not isinstance(self.linear, WeightFormat):
            return 0
        if self.linear.group_size is None:
            return parameters.outputs
        return parameters.linear / self.linear.group_size

    @property
    def head_name(self) -> str:
        """What the head is held in."""
        return self.other if self.head is None else getattr(self.head, "name", str(self.head))

    def head_bytes(self, parameters: Parameters) -> int:
        """Of the head; 0 where the embedding serves for it."""
        if isinstance(self.head, WeightFormat):
            return round(parameters.embedding * _code_bytes(self.head))
        return parameters.head * _PLAIN_BYTES[self.head or self.other]


def _code_bytes(fmt: WeightFormat) -> float:
    """Kernels keep 3 bits as 4."""
    return 0.5 if fmt.code in (WeightCode.INT4, WeightCode.INT3) else 1


def held_as(config: Mapping[str, Any], weights: str = AUTO) -> HeldAs:
    """What a GPU holds of a checkpoint, by its config.json; `weights` names another format of Linear layers.

    Raises:
        ConfigError: no such weight format.
    """
    other = _DTYPES.get(str(config.get("dtype", config.get("torch_dtype"))).removeprefix("torch."), "bf16")
    if weights == AUTO:
        scale_bytes = 4 if other == "fp32" and _has_groups(config) else 2
        return HeldAs(linear=_stored(config) or other, other=other, scale_bytes=scale_bytes)
    if weights in _PLAIN_BYTES:
        return HeldAs(linear=weights, other=weights)
    if weights == _NF4:
        return HeldAs(linear=_NF4, other=other)
    try:
        return HeldAs(linear=parse_weight_format(weights), other=other)
    except ConfigError as error:
        raise ConfigError(
            f"weights must be one of {', '.join(NAMES)}, got {weights!r}{nearest(weights, list(NAMES))}"
        ) from error


def _has_groups(config: Mapping[str, Any]) -> bool:
    """True for compressed-tensors, whose scales have the type of the rest; others' are 16-bit."""
    return (
        isinstance(config.get("quantization_config"), Mapping)
        and "config_groups" in (config["quantization_config"])
    )


def _stored(config: Mapping[str, Any]) -> str | WeightFormat | None:
    """The format of a quantized checkpoint's Linear layers: of several the first that the config lists.

    None for an unquantized one, and for methods that aren't known.
    """
    said = config.get("quantization_config")
    if not isinstance(said, Mapping):
        return None
    groups = said.get("config_groups")
    if isinstance(groups, Mapping) and groups:
        first = next(iter(groups.values()))
        weights = first.get("weights") if isinstance(first, Mapping) else None
        if isinstance(weights, Mapping):
            if weights.get("type") == "float":
                return WeightFormat(code=WeightCode.FP8)
            return _integers(weights, "num_bits", symmetric=weights.get("symmetric"))
    if said.get("quant_method") == "fp8":
        return WeightFormat(code=WeightCode.FP8)
    if said.get("load_in_4bit"):
        return _NF4
    if said.get("load_in_8bit"):
        return WeightFormat(code=WeightCode.INT8)
    zero_points = said.get("zero_point", not said.get("sym", True))
    return _integers(said, "bits", symmetric=not zero_points)


def _integers(said: Mapping[str, Any], key: str, *, symmetric: object) -> WeightFormat | None:
    code = INTEGER_CODES.get(said.get(key, said.get("w_bit")))
    group = said.get("group_size", said.get("q_group_size"))
    if code is None:
        return None
    is_group = isinstance(group, int) and not isinstance(group, bool) and group > 0 and group % 8 == 0
    return WeightFormat(code=code, group_size=group if is_group else None, symmetric=symmetric is not False)
