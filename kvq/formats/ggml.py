"""Types of GGUF tensors: sizes of their blocks, and what a block contains; names of files. No tensors.

A row of a tensor is a sequence of blocks. A block of 32 values has one scale, and in some types one minimum.
A block of 256 values is divided into groups with small scales of their own. Source: ggml's `ggml-common.h`
and the GGUF specification.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from kvq.formats.weights import Inputs

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class GgmlType:
    """One type of a GGUF tensor.

    `bits`, `group`: of a code, and the number of values that share a scale; 0 for types without blocks.
    `inputs`: rounding of the inputs of a Linear layer whose weight is stored so.
    """

    name: str  # as other tools write it: Q4_K, F16
    number: int  # in a file
    values: int = 1  # of a block
    nbytes: int  # of a block
    bits: int = 0
    group: int = 0
    has_minimum: bool = False
    inputs: Inputs = Inputs.GROUPS

    @property
    def is_float(self) -> bool:
        """True for F32, F16 and BF16, whose values are stored one by one."""
        return self.group == 0

    @property
    def on_gpus(self) -> bool:
        """True if kernels multiply this type in blocks on GPUs, too; others are dequantized there."""
        return self.name in ("Q4_0", "Q8_0", "Q4_K", "Q6_K")

    @property
    def panel_bytes(self) -> int:
        """Size of a block as kernels keep it, where a scale or minimum of 6 bits takes a byte."""
        return self.nbytes + {"Q3_K": 4, "Q4_K": 4, "Q5_K": 4}.get(self.name, 0)


_TYPES = (
    GgmlType(name="F32", number=0, nbytes=4),
    GgmlType(name="F16", number=1, nbytes=2),
    GgmlType(name="BF16", number=30, nbytes=2),
    GgmlType(name="Q4_0", number=2, values=32, nbytes=18, bits=4, group=32),
    GgmlType(name="Q4_1", number=3, values=32, nbytes=20, bits=4, group=32, has_minimum=True),
    GgmlType(name="Q5_0", number=6, values=32, nbytes=22, bits=5, group=32),
    GgmlType(name="Q5_1", number=7, values=32, nbytes=24, bits=5, group=32, has_minimum=True),
    GgmlType(name="Q8_0", number=8, values=32, nbytes=34, bits=8, group=32),
    GgmlType(name="Q2_K", number=10, values=256, nbytes=84, bits=2, group=16, has_minimum=True),
    GgmlType(name="Q3_K", number=11, values=256, nbytes=110, bits=3, group=16),
    GgmlType(name="Q4_K", number=12, values=256, nbytes=144, bits=4, group=32, has_minimum=True),
    GgmlType(name="Q5_K", number=13, values=256, nbytes=176, bits=5, group=32, has_minimum=True),
    GgmlType(name="Q6_K", number=14, values=256, nbytes=210, bits=6, group=16),
    GgmlType(name="IQ4_NL", number=20, values=32, nbytes=18, bits=4, group=32),
    GgmlType(name="MXFP4", number=39, values=32, nbytes=17, bits=4, group=32),
)
GGML_TYPES = {kind.name: kind for kind in _TYPES}
TYPES_BY_NUMBER = {kind.number: kind for kind in _TYPES}
# Types that kvq does not read, by their number in a file, for messages
UNREAD_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
    40: "NVFP4",
}  # fmt: skip


def part_paths(path: Path) -> list[Path]:
    """Return the paths of all parts of a split model, told by the name of one, or the path alone."""
    match = _PART.fullmatch(path.name)
    count = int(match[3]) if match else 1
    if match is None or not 1 <= int(match[2]) <= count:
        return [path]
    return [path.with_name(f"{match[1]}-{i:05}-of-{match[3]}{match[4]}") for i in range(1, count + 1)]
