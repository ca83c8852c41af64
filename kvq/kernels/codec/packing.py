"""Packing of codes into bytes, in planes of 8, 4, 2 or 1 bits.

Codes of 2 to 8 bits are split into planes of 8, 4, 2 or 1 bits. The widest plane comes first and contains the
low bits: a 6-bit code has a plane for its low 4 bits, then a plane for its high 2 bits. With p = 8 / width
elements per byte, byte i of a plane contains elements i, i + dim/p, i + 2 dim/p, ... from its low bits up, so
that one load per packed byte yields p runs of adjacent elements.
"""

import torch
from torch import Tensor

from kvq.formats import Code


def pack(codes: Tensor, code: Code) -> Tensor:
    """Pack uint8 codes [..., dim] into uint8 bytes [..., dim * bits / 8]."""
    planes, shift = [], 0
    for width in code.planes:
        parts = ((codes >> shift) & ((1 << width) - 1)).chunk(8 // width, dim=-1)
        plane = parts[0].clone()
        for i, part in enumerate(parts[1:], start=1):
            plane |= part << (width * i)
        planes.append(plane)
        shift += width
    return planes[0] if len(planes) == 1 else torch.cat(planes, dim=-1)


def unpack(packed: Tensor, code: Code) -> Tensor:
    """Unpack uint8 bytes [..., dim * bits / 8] into uint8 codes [..., dim]."""
    dim = packed.shape[-1] * 8 // code.bits
    planes = packed.split([dim * width // 8 for width in code.planes], dim=-1)
    codes, shift = torch.zeros(*packed.shape[:-1], dim, dtype=torch.uint8, device=packed.device), 0
    for width, plane in zip(code.planes, planes, strict=True):
        mask = (1 << width) - 1
        codes |= torch.cat([(plane >> (width * i)) & mask for i in range(8 // width)], dim=-1) << shift
        shift += width
    return codes
