"""Table of codes, the stored forms of one element. A new code of an existing kind needs only an entry here.

Names, sizes, packing, the CPU kernels and the Triton kernels use it. CONTRIBUTING explains how to add a code.
"""

import re
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from kvq.errors import ConfigError


class Kind(Enum):
    """Interpretation of an element's bits."""

    FLOAT = "float"  # the element itself; no scale
    SCALED = "scaled"  # multiplied by the scale of its token row, or of its KV head
    GROUPED = "grouped"  # an unsigned integer; its group has a scale and a minimum


@dataclass(frozen=True, kw_only=True, slots=True)
class Code:  # D12: uniform codes, no codebooks
    """The stored form of one element."""

    FP32: ClassVar["Code"]
    BF16: ClassVar["Code"]
    FP16: ClassVar["Code"]
    FP8: ClassVar["Code"]
    INT8: ClassVar["Code"]
    INT6: ClassVar["Code"]
    INT5: ClassVar["Code"]
    INT4: ClassVar["Code"]
    INT3: ClassVar["Code"]
    INT2: ClassVar["Code"]

    name: str
    bits: int  # of a stored element; grouped codes may have 2 to 8
    kind: Kind
    largest: float = 0.0  # SCALED: the magnitude that the largest element of a row is scaled to
    group: int = 0  # GROUPED: elements of the largest group that the bare name chooses
    shown_groups: tuple[int, ...] = ()  # GROUPED: group sizes that help texts list
    span: float = 1.0  # GROUPED, with scales of 8 bits: the part of a group's range that its codes span

    def __post_init__(self) -> None:
        if not re.fullmatch("[a-z]+[0-9]+", self.name):
            raise ConfigError(f"a code's name is letters, then digits, such as uint6; got {self.name!r}")
        if self.kind is Kind.GROUPED and not (2 <= self.bits <= 8 and self.group > 0):
            raise ConfigError(
                f"{self.name}: grouped codes have 2 to 8 bits and a group, got {self.bits} bits, {self.group}"
            )

    def __str__(self) -> str:
        return self.name

    def __deepcopy__(self, memo: object) -> "Code":
        return self  # codes are compared by identity

    @property
    def is_float(self) -> bool:
        """True for unquantized codes, which have no scale."""
        return self.kind is Kind.FLOAT

    @property
    def is_grouped(self) -> bool:
        """True if groups of adjacent elements share a scale and a minimum."""
        return self.kind is Kind.GROUPED

    @property
    def planes(self) -> tuple[int, ...]:  # D6: widths that don't divide a byte are stored in planes
        """Powers of two that add up to `bits`, largest first; each is packed into bytes separately."""
        return tuple(width for width in (32, 16, 8, 4, 2, 1) if self.bits & width)

    @property
    def doubled(self) -> "Code":
        """Code with twice the bits, into which two channels that share their bits are packed."""
        return Code(name=f"pair{2 * self.bits}", bits=2 * self.bits, kind=self.kind, group=1)

    @property
    def multiple(self) -> int:
        """Number by which a row's length must be divisible for the row to fill complete bytes."""
        return max(1, 8 // self.planes[-1])


Code.FP32 = Code(name="fp32", bits=32, kind=Kind.FLOAT)
Code.BF16 = Code(name="bf16", bits=16, kind=Kind.FLOAT)
Code.FP16 = Code(name="fp16", bits=16, kind=Kind.FLOAT)
Code.FP8 = Code(name="fp8", bits=8, kind=Kind.SCALED, largest=448.0)  # E4M3FN
Code.INT8 = Code(name="int8", bits=8, kind=Kind.SCALED, largest=127.0)  # [-127, 127]
Code.INT6 = Code(name="int6", bits=6, kind=Kind.GROUPED, group=32)
Code.INT5 = Code(name="int5", bits=5, kind=Kind.GROUPED, group=32)
Code.INT4 = Code(name="int4", bits=4, kind=Kind.GROUPED, group=32, shown_groups=(32, 64, 128))
Code.INT3 = Code(name="int3", bits=3, kind=Kind.GROUPED, group=32, span=0.9)
Code.INT2 = Code(name="int2", bits=2, kind=Kind.GROUPED, group=32, shown_groups=(32,), span=0.8)

CODES: dict[str, Code] = {code.name: code for code in vars(Code).values() if isinstance(code, Code)}
