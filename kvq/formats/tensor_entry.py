"""Description of a tensor in a file of a model; its values are not read."""

from dataclasses import dataclass
from pathlib import Path

from kvq.formats.ggml import GGML_TYPES, GgmlType


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """One tensor of a safetensors or GGUF file; offsets are from the start of the file, in bytes."""

    name: str
    dtype: str  # as the file writes it: BF16, Q4_K
    shape: tuple[int, ...]  # as torch writes it: [out, in]; a row of `in` values is contiguous
    path: Path
    begin: int
    end: int

    @property
    def kind(self) -> GgmlType:
        """Type of a tensor of a GGUF file."""
        return GGML_TYPES[self.dtype]
