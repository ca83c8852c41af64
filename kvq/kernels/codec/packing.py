"""Packing of 4-bit and 2-bit codes: half-split and quarter-split.

With p = 8 / bits elements per byte, byte i of a row holds elements i, i + dim/p, i + 2 dim/p, ...
from its low bits up, so that one load per packed byte yields p whole runs of neighbours.
"""

import torch
from torch import Tensor


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [..., dim] -> uint8 bytes [..., dim * bits / 8]."""
    parts = codes.chunk(8 // bits, dim=-1)
    packed = parts[0].clone()
    for i, part in enumerate(parts[1:], start=1):
        packed |= part << (bits * i)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """uint8 bytes [..., dim * bits / 8] -> uint8 codes [..., dim]."""
    mask = (1 << bits) - 1
    return torch.cat([(packed >> (bits * i)) & mask for i in range(8 // bits)], dim=-1)
