"""Recurrent states, stored by layer in the blocks of their layer group."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvq.geometry import StateTensor
from kvq.layout import GroupLayout

Tensors = dict[tuple[str, int], Tensor]  # by name and index


class StateSlots:
    """State tensors of all layers, with one row per block."""

    def __init__(self, layout: GroupLayout, memory: Tensor) -> None:
        """`memory`: uint8 [num_blocks, block_bytes], the pool of the group of states."""
        self._layers: dict[int, Tensors] = {}  # by layer number in the model's code
        for region in layout.states:
            key = region.tensor.name, region.tensor.index
            self._layers.setdefault(region.number, {})[key] = _rows(memory, region.tensor, region.offset)

    def read(self, number: int, blocks: Tensor) -> Tensors:
        """Return copies of a layer's tensors, [len(blocks), *shape] each; `blocks`: int64."""
        return {key: rows[blocks] for key, rows in self._layers[number].items()}

    def write(self, number: int, blocks: Tensor, values: Tensors) -> None:
        """Store a layer's tensors, one row per block."""
        layer = self._layers[number]
        for key, value in values.items():
            layer[key][blocks] = value.to(layer[key].dtype)


@torch.inference_mode(False)
def _rows(memory: Tensor, tensor: StateTensor, offset: int) -> Tensor:
    dtype = getattr(torch, tensor.dtype or "bfloat16")
    typed = memory.view(dtype)
    shape: Sequence[int] = tensor.shape
    strides = [1] * len(shape)
    for i in reversed(range(len(shape) - 1)):
        strides[i] = strides[i + 1] * shape[i + 1]
    return typed.as_strided(
        (len(memory), *shape), (typed.stride(0), *strides), typed.storage_offset() + offset // dtype.itemsize
    )
