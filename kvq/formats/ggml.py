"""Types of GGUF tensors: sizes of their blocks, and what a block contains; names of files. No tensors.

A row of a tensor is a sequence of blocks. A block of 32 values has one scale, and in some types one minimum.
A block of 256 values is divided into groups with small scales of their own. Source: ggml's `ggml-common.h`
and the GGUF specification.
"""

import json
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


_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_TYPES = [GgmlType(**facts) for facts in _TABLE["read"]]
GGML_TYPES = {kind.name: kind for kind in _TYPES}
TYPES_BY_NUMBER = {kind.number: kind for kind in _TYPES}
# Types that kvq does not read, by their number in a file, for messages
UNREAD_TYPES: dict[int, str] = {int(number): name for number, name in _TABLE["unread"].items()}


def part_paths(path: Path) -> list[Path]:
    """Return the paths of all parts of a split model, told by the name of one, or the path alone."""
    match = _PART.fullmatch(path.name)
    count = int(match[3]) if match else 1
    if match is None or not 1 <= int(match[2]) <= count:
        return [path]
    return [path.with_name(f"{match[1]}-{i:05}-of-{match[3]}{match[4]}") for i in range(1, count + 1)]
