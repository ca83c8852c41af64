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
    as the rest; a format rounds a tied one apart from its embedding. `shares_head`: an embedding that serves
    for the head is held as the head, not as the rest. `scale_bytes`: of one scale.
    `has_packed_experts`: stacked experts are held as Linear layers are, not as the rest.
    """

    linear: str | WeightFormat
    other: str = "fp16"
    head: str | WeightFormat | None = None
    shares_head: bool = False
    scale_bytes: int = 2
    has_packed_experts: bool = False

    @property
    def name(self) -> str:
        """Of what Linear layers are held in."""
        return _name(self.linear)

    @property
    def code_bytes(self) -> float:
        """Of a weight of a Linear layer, without scales."""
        return _bytes(self.linear)

    @property
    def expert_bytes(self) -> float:
        """Of a weight of an expert, without scales."""
        return self.code_bytes if self.has_packed_experts else self.other_bytes

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
        """Of all Linear layers, and of experts that are held as these are."""
        weights, outputs = parameters.linear, parameters.outputs
        if self.has_packed_experts:
            weights, outputs = weights + parameters.experts, outputs + parameters.expert_outputs
        if isinstance(self.linear, WeightFormat):
            group = self.linear.group_size
            return outputs if group is None else weights / group
        return weights / _NF4_BLOCK if self.linear == _NF4 else 0

    @property
    def head_name(self) -> str:
        """What the head is held in."""
        return _name(self.head or self.other)

    def is_shared(self, parameters: Parameters) -> bool:
        """Whether the embedding is held as the head."""
        return self.shares_head and not parameters.head and not isinstance(self.head, WeightFormat)

    def head_bytes(self, parameters: Parameters) -> int:
        """Of the head; 0 where the embedding serves for it, held as the rest and not rounded apart."""
        is_apart = isinstance(self.head, WeightFormat) or self.is_shared(parameters)
        count = parameters.embedding if is_apart else parameters.head
        return round(count * _bytes(self.head or self.other))


def _name(kind: str | WeightFormat) -> str:
    return kind if isinstance(kind, str) else kind.name


def _bytes(kind: str | WeightFormat) -> float:
    """Of a weight; kernels keep 3 bits as 4."""
    if isinstance(kind, str):
        return 0.5 if kind == _NF4 else _PLAIN_BYTES[kind]
    return 0.5 if kind.code in (WeightCode.INT4, WeightCode.INT3) else 1


def held_as(config: Mapping[str, Any], weights: str = AUTO) -> HeldAs:
    """What a GPU holds of a checkpoint, by its config.json; `weights` names another format of Linear layers.

    Raises:
        ConfigError: no such weight format.
    """
    other = _DTYPES.get(str(config.get("dtype", config.get("torch_dtype"))).removeprefix("torch."), "bf16")
    if weights == AUTO:
        said = config.get("quantization_config")
        said = said if isinstance(said, Mapping) else {}
        # The scales of compressed-tensors have the type of the rest; others' are 16-bit.
        scale_bytes = 4 if other == "fp32" and "config_groups" in said else 2
        return HeldAs(linear=_stored(said) or other, other=other, scale_bytes=scale_bytes)
    if weights in (*_PLAIN_BYTES, _NF4):
        return HeldAs(linear=weights, other=other if weights == _NF4 else weights)
    try:
        return HeldAs(linear=parse_weight_format(weights), other=other)
    except ConfigError as error:
        raise ConfigError(
            f"weights must be one of {', '.join(NAMES)}, got {weights!r}{nearest(weights, list(NAMES))}"
        ) from error


def _stored(said: Mapping[str, Any]) -> str | WeightFormat | None:
    """The format of a quantized checkpoint's Linear layers: of several the first that the config lists.

    None for an unquantized one, and for methods that aren't known.
    """
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
