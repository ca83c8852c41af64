"""Names of KV formats, from docs/spec.md: what each says for rows of some length."""

import re
from dataclasses import dataclass, replace

BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8}
BITS |= {f"int{bits}": bits for bits in (6, 5, 4, 3, 2)}
FLOATS = ("fp32", "bf16", "fp16")
LARGEST = {"fp8": 448.0, "int8": 127.0}
_NAME = re.compile(
    r"([a-z]+[0-9]+)(?:_(?:(per_token_head)|(per_head)|(per_channel)|g(0|[1-9][0-9]{0,4})(_s8)?))?"
    r"(_mean)?(_rot)?"
)


@dataclass(frozen=True)
class Format:
    """What a name says for rows of `dim` elements."""

    code: str
    dim: int
    group: int = 0  # elements; 0 unless grouped
    is_narrow: bool = False
    is_static: bool = False
    is_per_channel: bool = False
    mean: bool = False
    rotated: bool = False

    @property
    def bits(self) -> int:
        return BITS[self.code]

    @property
    def is_paired(self) -> bool:
        """True if two channels share the bits of their codes."""
        return self.is_per_channel and self.bits <= 4

    @property
    def multiple(self) -> int:
        """Of which the elements of a row must be a multiple."""
        bits = self.bits << self.is_paired
        return (1 + self.is_paired) * (8 // min(8, bits & -bits))

    @property
    def code_bytes(self) -> int:
        return self.dim * self.bits // 8

    @property
    def scale_bytes(self) -> int:
        if self.group:
            return (2 if self.is_narrow else 4) * (self.dim // self.group)
        return 2 if self.code in LARGEST and not (self.is_static or self.is_per_channel) else 0

    @property
    def channel_bytes(self) -> int:
        """Of the scales per channel, for a KV head and block."""
        return (2 if self.code in LARGEST else 3) * self.dim if self.is_per_channel else 0

    @property
    def mean_bytes(self) -> int:
        own = mean_format(self.dim)
        return own.code_bytes + own.scale_bytes if self.mean else 0

    @property
    def name(self) -> str:
        """The canonical name."""
        middle = f"_g{self.group}" + "_s8" * self.is_narrow if self.group else ""
        if self.code in LARGEST:
            middle = "_per_head" if self.is_static else "_per_token_head"
        if self.is_per_channel:
            middle = "_per_channel"
        return self.code + middle + "_mean" * self.mean + "_rot" * self.rotated


def group_sizes(dim: int) -> list[int]:
    """Those that a row can be cut into."""
    half = dim // 2
    return [n for n in range(4, half + 1) if half % n == 0] + [dim]


def _chosen(dim: int, most: int) -> int:
    return max((n for n in group_sizes(dim) if n <= most), default=dim)


def mean_format(dim: int) -> Format:
    """In which block means are stored."""
    return Format("int4", dim, group=_chosen(dim, 64), is_narrow=True)


def parse(name: str, dim: int) -> Format:
    """The format of a name; ValueError if there is none that fits."""
    match = _NAME.fullmatch(name)
    if match is None or match[1] not in BITS:
        raise ValueError(f"no format is named {name!r}")
    code, token, head, channel, group, narrow, mean, rotated = match.groups()
    scaled, grouped = code in LARGEST, code not in LARGEST and code not in FLOATS
    if ((token or head) and not scaled) or ((group or mean) and not grouped):
        raise ValueError(f"no format is named {name!r}")
    if channel and (mean or not (grouped or code == "int8")):
        raise ValueError(f"no format is named {name!r}")
    fmt = Format(code, dim, is_static=bool(head), mean=bool(mean), rotated=bool(rotated))
    if channel:
        fmt = replace(fmt, is_per_channel=True)
    if dim % fmt.multiple:
        raise ValueError(f"{name} does not fit rows of {dim} elements")
    if channel or not grouped:
        return fmt
    if group is None:
        fmt = replace(fmt, group=_chosen(dim, 32), is_narrow=True, rotated=True)
    else:
        fmt = replace(fmt, group=int(group), is_narrow=bool(narrow))
    if fmt.group not in group_sizes(dim):
        raise ValueError(f"{name} does not fit rows of {dim} elements")
    return fmt
