"""KV format: how token rows are converted to bytes, and the resulting sizes. No tensors."""

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar
from uuid import uuid4

from kvq.errors import ConfigError, UnfitFormat
from kvq.formats.codes import CODES, Code

BLOCK_SIZE = 32  # tokens, by default
MOST_PAIRED_BITS = 4  # widest grouped codes with per-channel scales that are stored in pairs
_MEAN_GROUP = 64  # maximum number of elements of a block mean that share a scale
Through = Callable[[Any], Any]  # fp32 [..., dim], or [..., tokens, dim] of whole blocks -> the same shape


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Own:  # D8: blocks store the dequantized rows, in fp32
    """Registered quantizer of K or V rows, with its stated bits; blocks store the result in fp32."""

    registered: ClassVar[dict[str, "Own"]] = {}
    name: str
    through: Through = field(repr=False)
    bits: Callable[[int], float] = field(
        repr=False
    )  # per element, from the elements of a row; raises ConfigError for rows that don't fit
    tokens: int | None = None  # per block, if it quantizes whole blocks; None: it quantizes single rows
    # Another process may register a different quantizer by the same name, which can't read these blocks.
    nonce: str = field(default_factory=lambda: uuid4().hex, repr=False)

    def __deepcopy__(self, memo: object) -> "Own":
        return self  # compared by identity


def tokens_of(own: list[Own]) -> int | None:
    """Return the block size required by quantizers of complete blocks, in tokens, or None."""
    sizes = {one.tokens for one in own if one.tokens is not None}
    if len(sizes) > 1:
        raise ConfigError(f"registered formats take blocks of {sizes} tokens; all layers have one size")
    return sizes.pop() if sizes else None


@dataclass(frozen=True, slots=True)
class PerTokenHead:
    """One fp16 scale per token row, computed as the row is written."""


@dataclass(frozen=True, slots=True)
class PerHead:
    """One static fp32 scale per KV head, from calibration; nothing is stored per token."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """One scale and one minimum for every `group_size` adjacent elements of a token row.

    Both are fp16 or, if `is_narrow`, one byte each: the scale is (8 + m) * 2**(e - 23), with 5 bits for e and
    3 bits for m; the minimum is a number of steps of scale * 2**(bits - 7), from -128 to 127.
    """

    group_size: int  # elements
    is_narrow: bool = False

    def check(self, head_dim: int) -> None:
        """Raise UnfitFormat if a group straddles the two halves of a packed row."""
        fits = legal_group_sizes(head_dim)
        if self.group_size not in fits:
            raise UnfitFormat(
                f"group size must divide head_dim/2 or equal head_dim={head_dim}, "
                f"got {self.group_size}; use one of {fits}"
            )


@dataclass(frozen=True, slots=True)
class PerChannel:  # D2: K: scale and offset per channel of a block
    """One scale and one offset for each channel of a block (the same element of all its rows).

    The scale is a byte, as in narrow `Grouped`. For grouped codes, the offset is the channel's minimum, in
    fp16; for INT8, it is a byte: the middle of the channel's range, in steps of 16 scales. This mode requires
    full blocks. Grouped codes of up to 4 bits are stored in pairs: channels i and dim - 1 - i share twice the
    bits, and the channel with the larger range, according to the scale bytes, gets more of these bits. See
    codec/channel.py.
    """


ScaleMode = PerTokenHead | PerHead | Grouped | PerChannel


def legal_group_sizes(head_dim: int) -> list[int]:
    """Return the valid group sizes for a row: the divisors of head_dim/2 from 4 up, and `head_dim` itself."""
    half = head_dim // 2
    return [n for n in range(4, half + 1) if half % n == 0] + [head_dim]


@dataclass(frozen=True, kw_only=True, slots=True)
class KVFormat:
    """Conversion of token rows to bytes: code, scale mode, and optionally a block Hadamard rotation first.

    `mean`: the mean of a block's rows is stored once and subtracted from each row; this requires full blocks.
    `own`: a registered quantizer that is applied to the rows first; its output is stored unchanged in `code`.
    """

    code: Code
    scale: ScaleMode | None = None
    rotated: bool = False
    mean: bool = False
    own: Own | None = None

    def __post_init__(self) -> None:
        if self.code.is_float != (self.scale is None):
            raise ConfigError(f"{self.code.name} with scale mode {self.scale} is not a format")
        allowed = (Grouped, PerChannel) if self.code.is_grouped else (PerTokenHead, PerHead, PerChannel)
        if self.scale is not None and not isinstance(self.scale, allowed):
            raise ConfigError(f"{self.code.name} with scale mode {self.scale} is not a format")
        if self.is_per_channel and self.code not in (Code.INT8, *(x for x in CODES.values() if x.is_grouped)):
            raise ConfigError(f"{self.code.name} has no scales per channel; use int8, or fewer bits")
        if self.mean and not isinstance(self.scale, Grouped):
            raise ConfigError(f"block means are taken from grouped codes, such as int4, not {self.name}")

    @property
    def name(self) -> str:
        """The canonical name, which `parse_format` accepts."""
        if self.own is not None:
            return self.own.name
        match self.scale:
            case PerTokenHead():
                suffix = "_per_token_head"
            case PerHead():
                suffix = "_per_head"
            case PerChannel():
                suffix = "_per_channel"
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
    def is_per_channel(self) -> bool:
        """True if every channel of a block has its own scale."""
        return isinstance(self.scale, PerChannel)

    @property
    def needs_whole_blocks(self) -> bool:
        """True if blocks are quantized as a unit, once they are full."""
        return self.mean or self.is_per_channel or (self.own is not None and self.own.tokens is not None)

    @property
    def is_paired(self) -> bool:
        """True if channels are stored in pairs that share the bits of their codes."""
        return self.is_per_channel and self.code.is_grouped and self.code.bits <= MOST_PAIRED_BITS

    @property
    def is_narrow(self) -> bool:
        """True if a group's scale and minimum take one byte each."""
        return isinstance(self.scale, Grouped) and self.scale.is_narrow

    @property
    def span(self) -> float:  # D11: 3 bits span 0.9, 2 bits 0.8 of the range
        """Fraction of a group's range that its codes span; values outside it saturate."""
        return self.code.span if self.is_narrow else 1.0

    @property
    def is_quantized(self) -> bool:
        """True for all codes narrower than 16 bits, and for registered quantizers."""
        return not self.code.is_float or self.own is not None

    def fits(self, head_dim: int) -> bool:
        """True if codes of `head_dim` elements fill complete bytes."""
        return head_dim >= 1 and head_dim % self._multiple == 0

    @property
    def _multiple(self) -> int:
        return 2 * self.code.doubled.multiple if self.is_paired else self.code.multiple

    def check(self, head_dim: int) -> None:
        """Raise UnfitFormat if a row of `head_dim` elements can't be stored in this format."""
        if not self.fits(head_dim):
            raise UnfitFormat(
                f"rows of {self.name} fill whole bytes only where head_dim is a positive multiple of "
                f"{self._multiple}, got {head_dim}; use int8 or fp8"
            )
        if isinstance(self.scale, Grouped):
            self.scale.check(head_dim)
        if self.own is not None:
            self.own.bits(head_dim)

    def num_groups(self, head_dim: int) -> int:
        """Return the number of groups per token row; 0 unless the format is grouped."""
        return head_dim // self.scale.group_size if isinstance(self.scale, Grouped) else 0

    def code_bytes(self, head_dim: int) -> int:
        """Return the number of bytes of codes per token row."""
        return head_dim * self.code.bits // 8

    def scale_bytes(self, head_dim: int) -> int:
        """Return the number of bytes of scales (and minimums) stored per token row."""
        if isinstance(self.scale, PerTokenHead):
            return 2
        return (2 if self.is_narrow else 4) * self.num_groups(head_dim)

    def channel_bytes(self, head_dim: int) -> int:
        """Return the bytes of a KV head's scales and offsets per block; 0 unless scales are per channel."""
        if not self.is_per_channel:
            return 0
        return (3 if self.code.is_grouped else 2) * head_dim

    def mean_bytes(self, head_dim: int) -> int:
        """Return the bytes of a KV head's mean per block (codes, then scales), or 0 without `mean`."""
        if not self.mean:
            return 0
        fmt = mean_format(head_dim)
        return fmt.code_bytes(head_dim) + fmt.scale_bytes(head_dim)

    def bits_per_element(self, head_dim: int, block_size: int = BLOCK_SIZE) -> Fraction:
        """Return the stored bits per element, including per-block data for blocks of `block_size` tokens.

        For a registered quantizer, return its stated bits.
        """
        if self.own is not None:
            return Fraction(self.own.bits(head_dim))
        row = self.code_bytes(head_dim) + self.scale_bytes(head_dim)
        once = self.channel_bytes(head_dim) + self.mean_bytes(head_dim)
        return Fraction(8 * (row + Fraction(once, block_size)), head_dim)


def mean_format(head_dim: int) -> KVFormat:
    """Return the format of block means, rotated like their rows: INT4 with the largest groups of up to 64."""
    fitting = [n for n in legal_group_sizes(head_dim) if n <= _MEAN_GROUP]
    return KVFormat(code=Code.INT4, scale=Grouped(max(fitting, default=head_dim), is_narrow=True))
