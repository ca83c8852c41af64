"""What a KV format is: how token rows become bytes. Counts and describes; never touches tensors."""

from dataclasses import dataclass
from fractions import Fraction

from kvq.errors import ConfigError, UnfitFormat
from kvq.formats.codes import Code

BLOCK_SIZE = 32  # tokens; wherever nobody chose another
_MEAN_GROUP = 64  # elements of a block mean that share a scale, at most


@dataclass(frozen=True, slots=True)
class PerTokenHead:
    """One fp16 scale per token row, found when the row is written."""


@dataclass(frozen=True, slots=True)
class PerHead:
    """One static fp32 scale per KV head, from calibration; nothing is stored per token."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """`group_size` neighbouring elements of a token row share a scale and a minimum.

    Both are fp16, or, where `is_narrow`, a byte each: the scale (8 + m) * 2**(e - 23) of 5 bits e and 3
    bits m, and the minimum in steps of scale * 2**(bits - 7), -128 to 127 of them.
    """

    group_size: int  # elements
    is_narrow: bool = False

    def check(self, head_dim: int) -> None:
        """Raise UnfitFormat unless no group straddles the two halves of a packed row."""
        fits = legal_group_sizes(head_dim)
        if self.group_size not in fits:
            raise UnfitFormat(
                f"group size must divide head_dim/2 or equal head_dim={head_dim}, "
                f"got {self.group_size}; use one of {fits}"
            )


ScaleMode = PerTokenHead | PerHead | Grouped


def legal_group_sizes(head_dim: int) -> list[int]:
    """Group sizes of at least 4 elements that a row of `head_dim` elements can be cut into."""
    half = head_dim // 2
    return [n for n in range(4, half + 1) if half % n == 0] + [head_dim]


@dataclass(frozen=True, kw_only=True, slots=True)
class KVFormat:
    """How token rows become bytes: code, scale mode, and a block Hadamard rotation before both.

    `mean`: the mean of every block's rows is stored once and taken from them; a block must be whole for it.
    """

    code: Code
    scale: ScaleMode | None = None
    rotated: bool = False
    mean: bool = False

    def __post_init__(self) -> None:
        if self.code.is_float != (self.scale is None):
            raise ConfigError(f"{self.code.name} with scale mode {self.scale} is not a format")
        if self.code.is_grouped != isinstance(self.scale, Grouped):
            raise ConfigError(f"{self.code.name} with scale mode {self.scale} is not a format")
        if self.mean and not self.code.is_grouped:
            raise ConfigError(f"block means are taken from grouped codes, such as int4, not {self.code.name}")

    @property
    def name(self) -> str:
        """The canonical name, which `parse_format` reads back."""
        match self.scale:
            case PerTokenHead():
                suffix = "_per_token_head"
            case PerHead():
                suffix = "_per_head"
            case Grouped(group_size=size, is_narrow=narrow):
                suffix = f"_g{size}" + ("_s8" if narrow else "")
            case _:
                suffix = ""
        return self.code.name + suffix + ("_mean" if self.mean else "") + ("_rot" if self.rotated else "")

    @property
    def is_static(self) -> bool:
        """True if the scales come from calibration."""
        return isinstance(self.scale, PerHead)

    @property
    def is_narrow(self) -> bool:
        """True if a group's scale and minimum are a byte each."""
        return isinstance(self.scale, Grouped) and self.scale.is_narrow

    @property
    def span(self) -> float:
        """The part of a group's range that its codes span; what lies outside saturates."""
        return self.code.span if self.is_narrow else 1.0

    @property
    def is_quantized(self) -> bool:
        """True for every code narrower than 16 bits."""
        return not self.code.is_float

    def check(self, head_dim: int) -> None:
        """Raise UnfitFormat if a row of `head_dim` elements can't be stored in this format."""
        multiple = self.code.multiple
        if head_dim < 1 or head_dim % multiple:
            raise UnfitFormat(
                f"rows of {self.name} fill whole bytes only where head_dim is a positive multiple of "
                f"{multiple}, got {head_dim}; use int8 or fp8"
            )
        if isinstance(self.scale, Grouped):
            self.scale.check(head_dim)

    def num_groups(self, head_dim: int) -> int:
        """Groups per token row; 0 unless the format is grouped."""
        return head_dim // self.scale.group_size if isinstance(self.scale, Grouped) else 0

    def code_bytes(self, head_dim: int) -> int:
        """Bytes of codes per token row."""
        return head_dim * self.code.bits // 8

    def scale_bytes(self, head_dim: int) -> int:
        """Bytes of scales (and minimums) stored per token row."""
        if isinstance(self.scale, PerTokenHead):
            return 2
        return (2 if self.is_narrow else 4) * self.num_groups(head_dim)

    def mean_bytes(self, head_dim: int) -> int:
        """Bytes of a KV head's mean, codes and then scales, per block; 0 without `mean`."""
        if not self.mean:
            return 0
        fmt = mean_format(head_dim)
        return fmt.code_bytes(head_dim) + fmt.scale_bytes(head_dim)

    def bits_per_element(self, head_dim: int, block_size: int = BLOCK_SIZE) -> Fraction:
        """Stored bits per element, scales, minimums and means of blocks of `block_size` tokens included."""
        row = self.code_bytes(head_dim) + self.scale_bytes(head_dim)
        return Fraction(8 * (row + Fraction(self.mean_bytes(head_dim), block_size)), head_dim)


def mean_format(head_dim: int) -> KVFormat:
    """In which block means are stored, rotated where their rows are: INT4, the largest groups up to 64."""
    fitting = [n for n in legal_group_sizes(head_dim) if n <= _MEAN_GROUP]
    return KVFormat(code=Code.INT4, scale=Grouped(max(fitting, default=head_dim), is_narrow=True))
