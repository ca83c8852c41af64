"""Tensors of a GGUF model under transformers' names: values, or rows of blocks as they lie in the file."""

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from kvq.errors import ModelError, first_lines
from kvq.formats.ggml import GgmlType
from kvq.formats.tensor_entry import TensorEntry
from kvq.kernels.codec.ggml import dequantize
from kvq.models.gguf.names import Source


class GgufTensors(Mapping[str, Tensor]):
    """Mapping from transformers' names to dequantized tensors; each tensor is memory-mapped on access."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = sources

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor's values: fp32, or those of F16 and BF16 as they are stored."""
        source = self._sources[name]
        values = dequantize(self.blocks(name), source.tensor.kind)
        return (values - source.shift if source.shift else values).view(source.tensor.shape)

    def kind(self, name: str) -> GgmlType:
        """Return the type in which a tensor is stored."""
        return self._sources[name].tensor.kind

    def blocks(self, name: str) -> Tensor:
        """Return a tensor's rows as they are stored, in transformers' order: uint8 [rows, row_bytes].

        The rows of vectors are single values. Unless rows are in another order in GGUF, they share memory
        with the mapped file, and must not be written.
        """
        source = self._sources[name]
        raw = _mapped(source.tensor).view(source.tensor.shape[0], -1)
        if source.heads is None:
            return raw
        order = torch.arange(len(raw)).view(source.heads, -1, 2).transpose(1, 2)  # [heads, halves, dim / 2]
        return raw[order.flatten()]

    def is_mapped(self, name: str) -> bool:
        """Return True if a tensor's rows share memory with the mapped file."""
        return self._sources[name].heads is None

    def path_of(self, name: str) -> Path:
        """Return the file that contains a tensor."""
        return self._sources[name].tensor.path

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def _mapped(tensor: TensorEntry) -> Tensor:
    """Return a tensor's bytes, uint8 [end - begin], which are unmapped with the result."""
    first = tensor.begin - tensor.begin % mmap.ALLOCATIONGRANULARITY
    try:
        with tensor.path.open("rb") as file:  # private, since torch has no tensors that can't be written
            mapped = mmap.mmap(file.fileno(), tensor.end - first, access=mmap.ACCESS_COPY, offset=first)
    except (OSError, ValueError) as error:
        raise ModelError(f"can't read {tensor.path}: {first_lines(error)}") from error
    return torch.frombuffer(mapped, dtype=torch.uint8)[tensor.begin - first :]
