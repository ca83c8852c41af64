"""What a KV format is: how token rows become bytes. Counts and describes; never touches tensors."""

from dataclasses import dataclass
from fractions import Fraction

from kvq.errors import ConfigError, UnfitFormat
from kvq.formats.codes import Code


@dataclass(frozen=True, slots=True)
class PerTokenHead:
    """One fp16 scale per token row, found when the row is written."""


@dataclass(frozen=True, slots=True)
class PerHead:
    """One static fp32 scale per KV head, from calibration; nothing is stored per token."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """`group_size` neighbouring elements of a token row share an fp16 scale and an fp16 minimum."""

    group_size: int  # elements

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
    """How token rows become bytes: code, scale mode, and a block Hadamard rotation before both."""

    code: Code
    scale: ScaleMode | None = None
    rotated: bool = False

    def __post_init__(self) -> None:
        if self.code.is_float != (self.scale is None):
            raise ConfigError(f"{self.code.name} with scale mode {self.scale} is not a format")
        if self.code.is_grouped != isinstance(self.scale, Grouped):
            raise ConfigError(f"{self.code.name} with scale mode {self.scale} is not a format")

    @property
    def name(self) -> str:
        """The canonical name, which `parse_format` reads back."""
        match self.scale:
            case PerTokenHead():
                suffix = "_per_token_head"
            case PerHead():
                suffix = "_per_head"
            case Grouped(group_size=size):
                suffix = f"_g{size}"
            case _:
                suffix = ""
        return self.code.name + suffix + ("_rot" if self.rotated else "")

    @property
    def is_static(self) -> bool:
        """True if the scales come from calibration."""
        return isinstance(self.scale, PerHead)

    @property
    def is_quantized(self) -> bool:
        """True for every code narrower than 16 bits."""
        return not self.code.is_float

    def check(self, head_dim: int) -> None:
        """Raise UnfitFormat if a row of `head_dim` elements can't be stored in this format."""
        multiple = self.code.multiple
        if head_dim < 1 or head_dim % multiple:
            raise UnfitFormat(
                f"{self.name} packs {multiple} elements into a byte, so head_dim must be a multiple "
                f"of {multiple}, got {head_dim}; use int8 or fp8"
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
        return 4 * self.num_groups(head_dim)

    def bits_per_element(self, head_dim: int) -> Fraction:
        """Stored bits per element, scales and minimums included."""
        return Fraction(8 * (self.code_bytes(head_dim) + self.scale_bytes(head_dim)), head_dim)
