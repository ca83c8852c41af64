"""Block Hadamard rotation: spreads outlier channels over their block before quantization.

Source: Ashkboos et al., "QuaRot", 2024, section 4; the fast Walsh-Hadamard transform.
"""

from functools import lru_cache

import torch
from torch import Tensor


def hadamard_block(dim: int) -> int:
    """Return the largest power of two that divides `dim`: the block size of the rotation, in elements."""
    return dim & -dim


def rotate(x: Tensor) -> Tensor:  # D22: Hadamard, no calibrated map per head
    """Rotate the last dimension block by block; the rotation is its own inverse.

    `x`: [..., dim], any float dtype. Returns fp32 [..., dim]: fp32 butterflies with stages
    h = 1, 2, 4, ..., then one multiplication by block**-0.5, in this order on every backend, so
    that codes agree bit for bit.
    """
    dim = x.shape[-1]
    block = hadamard_block(dim)
    y = x.float()
    h = 1
    while h < block:
        pairs = y.reshape(*x.shape[:-1], dim // (2 * h), 2, h)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack((low + high, low - high), dim=-2)
        h *= 2
    scaled: Tensor = y.reshape(x.shape) * block**-0.5
    return scaled


def rotate_by_product(x: Tensor) -> Tensor:
    """Rotate by one matrix product, fp32 [..., dim]: faster for many rows, but the last bits may differ."""
    block = hadamard_block(x.shape[-1])
    product: Tensor = (x.float().reshape(-1, block) @ _matrix(block, x.device)).view(x.shape)
    return product


@lru_cache(maxsize=32)
def _matrix(block: int, device: torch.device) -> Tensor:
    """Return the matrix of `rotate` for one block, fp32 [block, block]: symmetric, its own inverse."""
    with torch.inference_mode(False):
        return rotate(torch.eye(block, device=device, dtype=torch.float32))
