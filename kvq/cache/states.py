"""Recurrent states in the blocks of their layer group, by layer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvq.layout import GroupLayout, StateRegion

Key = tuple[int, str, int]  # number of the layer in the model's code, name and index of the tensor


class StateSlots:
    """The tensors of every layer's state, one row a block."""

    def __init__(self, layout: GroupLayout, memory: Tensor) -> None:
        """`memory`: uint8 [num_blocks, block_bytes], a pool of the group of states."""
        self._rows = {_key(region): _rows(region, memory) for region in layout.states}

    def of_layer(self, number: int) -> dict[tuple[str, int], Tensor]:
        """A layer's tensors, each [num_blocks, *shape], by name and index."""
        return {(name, i): rows for (layer, name, i), rows in self._rows.items() if layer == number}

    def read(self, number: int, blocks: Tensor) -> dict[tuple[str, int], Tensor]:
        """Copies of a layer's tensors, [len(blocks), *shape] each; `blocks`: int64."""
        return {key: rows[blocks] for key, rows in self.of_layer(number).items()}

    def write(self, number: int, blocks: Tensor, values: dict[tuple[str, int], Tensor]) -> None:
        """Store a layer's tensors in as many blocks."""
        for (name, index), value in values.items():
            rows = self._rows[number, name, index]
            rows[blocks] = value.to(rows.dtype)


def _key(region: StateRegion) -> Key:
    return region.number, region.tensor.name, region.tensor.index


@torch.inference_mode(False)
def _rows(region: StateRegion, memory: Tensor) -> Tensor:
    dtype = getattr(torch, region.tensor.dtype or "bfloat16")
    typed = memory.view(dtype)
    shape: Sequence[int] = region.tensor.shape
    strides = [1] * len(shape)
    for i in reversed(range(len(shape) - 1)):
        strides[i] = strides[i + 1] * shape[i + 1]
    offset = region.offset // dtype.itemsize
    return typed.as_strided(
        (len(memory), *shape), (typed.stride(0), *strides), typed.storage_offset() + offset
    )
