"""The bytes of one layer group's blocks, read, written and zeroed block by block."""

import torch
from torch import Tensor

from kvq.cache.memory import allocate_bytes
from kvq.layout import GroupLayout


class PoolBytes:
    """One layer group's pool on one device."""

    def __init__(self, layout: GroupLayout, num_blocks: int, device: torch.device) -> None:
        """Allocate a zeroed pool.

        Raises:
            OutOfMemory: it does not fit on the device; nothing was allocated.
        """
        self.layout = layout
        self.num_blocks = num_blocks
        self.memory = allocate_bytes(layout.pool_bytes(num_blocks), device)  # uint8 [pool_bytes]
        # One uint8 [num_blocks, run bytes] per run of a block: neighbouring blocks' runs touch.
        self.parts = tuple(
            self.memory[run.offset : run.offset + num_blocks * run.nbytes].view(num_blocks, run.nbytes)
            for run in layout.runs(0, num_blocks)
        )

    def read(self, block: int) -> Tensor:
        """A copy of a block's runs in order, uint8 [block_bytes] on the host.

        The bytes are the same in both block orders: layer after layer.
        """
        return torch.cat([part[block] for part in self.parts]).cpu()

    def write(self, block: int, content: Tensor) -> None:
        """Overwrite a block with what `read` gave: `content` uint8 [block_bytes]."""
        pieces = content.to(self.memory.device).split([part.shape[1] for part in self.parts])
        for part, piece in zip(self.parts, pieces, strict=True):
            part[block] = piece

    def zero(self, block: int) -> None:
        """Zero a block: codes, scales and padding."""
        for part in self.parts:
            part[block] = 0

    def grown(self, num_blocks: int) -> "PoolBytes":
        """A larger pool with the same bytes under the same block ids; this one stays as it is.

        Raises:
            OutOfMemory: both don't fit on the device at once.
        """
        larger = PoolBytes(self.layout, num_blocks, self.memory.device)
        for new, old in zip(larger.parts, self.parts, strict=True):
            new[: self.num_blocks] = old
        return larger
