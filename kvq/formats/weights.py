"""Weight formats: code, grouping, and rounding of the layer's inputs. No tensors."""

import re
from dataclasses import dataclass, replace
from enum import Enum

from kvq.errors import ConfigError, nearest
from kvq.formats.names import GROUP, respelled


class WeightCode(Enum):
    """Stored form of one weight; the enum value is its name."""

    INT8 = "int8"
    INT4 = "int4"
    INT3 = "int3"
    FP8 = "fp8"  # E4M3FN byte

    @property
    def bits(self) -> int:
        """Width of one stored weight in bits."""
        return {WeightCode.INT8: 8, WeightCode.INT4: 4, WeightCode.INT3: 3, WeightCode.FP8: 8}[self]

    @property
    def is_integer(self) -> bool:
        """False for FP8, whose codes have no zero point."""
        return self is not WeightCode.FP8


INTEGER_CODES = {code.bits: code for code in WeightCode if code.is_integer}  # by their width


class Inputs(Enum):
    """Rounding of a layer's inputs before the product; each token's scale is based on its maximum."""

    FULL = "full"  # no rounding
    INT8 = "int8"  # symmetric, [-127, 127]
    FP8 = "fp8"  # E4M3FN
    GROUPS = "groups"  # as INT8, with a scale for each group of inputs whose weights share one


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFormat:
    """Conversion of a Linear layer's weight [out, in] to bytes.

    w = (q - zero) * scale with one scale, and one zero point unless symmetric, for every `group_size`
    adjacent inputs of an output row, or for the whole row. Integer codes are signed:
    -2^(bits-1) <= q < 2^(bits-1).
    """

    code: WeightCode
    group_size: int | None = None  # inputs; None: the whole row ("per channel")
    symmetric: bool = True
    inputs: Inputs = Inputs.FULL

    def __post_init__(self) -> None:
        if self.group_size is not None and (self.group_size < 8 or self.group_size % 8):
            raise ConfigError(f"group size must be a multiple of 8, got {self.group_size}; 128 is usual")
        if self.code is WeightCode.FP8 and not (self.symmetric and self.group_size is None):
            raise ConfigError("fp8 weights have a scale per output row and no zero point")
        if self.inputs is not Inputs.FULL and (self.inputs is Inputs.FP8) != (self.code is WeightCode.FP8):
            raise ConfigError(f"{self.code.value} weights don't go with {self.inputs.value} inputs")

    @property
    def name(self) -> str:
        """The canonical name, which `parse_weight_format` accepts."""
        whole_row = "_channel" if self.code in _GROUPED else ""
        group = whole_row if self.group_size is None else f"_g{self.group_size}"
        asymmetric = "" if self.symmetric else "_asym"
        return self.code.value + group + asymmetric + _SUFFIXES[self.inputs]

    def groups(self, in_features: int) -> int:
        """Return the number of scales per output row.

        Raises:
            ConfigError: the group size does not divide the inputs.
        """
        if self.group_size is None:
            return 1
        if in_features % self.group_size:
            fits = [size for size in (256, 128, 64, 32, 16, 8) if in_features % size == 0]
            raise ConfigError(
                f"groups of {self.group_size} don't divide {in_features} inputs; use one of {fits} or none"
            )
        return in_features // self.group_size


_SUFFIXES = {Inputs.FULL: "", Inputs.INT8: "_a8", Inputs.FP8: "_a8", Inputs.GROUPS: ""}
_GROUPED = (WeightCode.INT4, WeightCode.INT3)  # in groups of 128 inputs, unless the name says otherwise
_NAME = re.compile(r"(int8|int4|int3|fp8)(?:_g(\d+)|(_channel))?(_asym)?(_a8)?")
_ALIASES = {"w8a8": "int8_a8", "w4a8": "int4_a8", "q8_0": "int8_g32", "q4_0": "int4_g32"}
WEIGHT_NAMES = ("int8", "int4", "int4_g64", "int3", "fp8", "fp8_a8", "w8a8", "w4a8")


def parse_weight_format(name: str) -> WeightFormat:
    """Return the format called `name`: `int8`, `int4_g64`, `int4_g128_asym`, `fp8`, `w8a8` ...

    Raises:
        ConfigError: there is no such format.
    """
    match = isinstance(name, str) and _NAME.fullmatch(_ALIASES.get(name, name))
    if not match:
        raise ConfigError(
            f"unknown weight format {name!r}{_meant(str(name)) or ';'} "
            f"allowed: {', '.join(WEIGHT_NAMES)}; _gN sets the group, _channel none, _asym adds zero points"
        )
    code, group, whole_row, asymmetric, inputs = match.groups()
    if group is None and whole_row is None and WeightCode(code) in _GROUPED:
        group = "128"
    own = Inputs.FP8 if code == "fp8" else Inputs.INT8
    fmt = WeightFormat(
        code=WeightCode(code), group_size=None if group is None else int(group), symmetric=not asymmetric
    )
    return replace(fmt, inputs=own) if inputs else fmt


def _meant(name: str) -> str:
    """Return `; did you mean 'x'?` with a similar name, or an empty string."""
    code, ends = respelled(name, [code.value for code in WeightCode], (GROUP, "channel", "asym", "a8"))
    hint = "_".join([code, *ends.values()])
    return f"; did you mean {hint!r}?" if _NAME.fullmatch(hint) else nearest(name, WEIGHT_NAMES)
