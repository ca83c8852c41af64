"""Names of KV formats, from docs/spec.md: what each says for rows of some length."""

import re
from dataclasses import dataclass, replace

BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8}
BITS |= {f"int{bits}": bits for bits in (6, 5, 4, 3, 2)}
FLOATS = ("fp32", "bf16", "fp16")
LARGEST = {"fp8": 448.0, "int8": 127.0}
_NAME = re.compile(
    r"([a-z]+[0-9]+)(?:_(?:(per_token_head)|(per_head)|g(0|[1-9][0-9]{0,4})(_s8)?))?(_mean)?(_rot)?"
)


@dataclass(frozen=True)
class Format:
    """What a name says for rows of `dim` elements."""

    code: str
    dim: int
    group: int = 0  # elements; 0 unless grouped
    is_narrow: bool = False
    is_static: bool = False
    mean: bool = False
    rotated: bool = False

    @property
    def bits(self) -> int:
        return BITS[self.code]

    @property
    def planes(self) -> list[int]:
        return [width for width in (8, 4, 2, 1) if self.bits & width]

    @property
    def code_bytes(self) -> int:
        return self.dim * self.bits // 8

    @property
    def scale_bytes(self) -> int:
        if self.group:
            return (2 if self.is_narrow else 4) * (self.dim // self.group)
        return 2 if self.code in LARGEST and not self.is_static else 0

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
    code, token, head, group, narrow, mean, rotated = match.groups()
    scaled, grouped = code in LARGEST, code not in LARGEST and code not in FLOATS
    if ((token or head) and not scaled) or ((group or mean) and not grouped):
        raise ValueError(f"no format is named {name!r}")
    fmt = Format(code, dim, is_static=bool(head), mean=bool(mean), rotated=bool(rotated))
    if not grouped:
        return fmt
    if group is None:
        fmt = replace(fmt, group=_chosen(dim, 32), is_narrow=True, rotated=True)
    else:
        fmt = replace(fmt, group=int(group), is_narrow=bool(narrow))
    if dim % (8 // fmt.planes[-1]) or fmt.group not in group_sizes(dim):
        raise ValueError(f"{name} does not fit rows of {dim} elements")
    return fmt
