"""FP8 E4M3FN by integer arithmetic, so that every device and interpreter agrees bit for bit.

Source: Micikevicius et al., "FP8 formats for deep learning", 2022, section 3. E4M3FN has no infinity: the
largest finite value is 448, and the bytes 0x7F and 0xFF are NaN.
"""

from functools import lru_cache

import torch
from torch import Tensor

LARGEST = 448.0
_SMALLEST_NORMAL = 2.0**-6
_SUBNORMAL_MAGIC = 2.0**14  # fp32 numbers near 2**14 are 2**-9 apart, the E4M3 subnormal step
_SUBNORMAL_MAGIC_BITS = 0x46800000  # the same as int32


def encode(x: Tensor) -> Tensor:
    """Round fp32 values to the nearest E4M3FN byte, ties to even, saturating at 448.

    `x`: fp32, finite, any shape. Returns uint8 of the same shape.
    """
    x = x.clamp(-LARGEST, LARGEST)
    magnitude = x.abs()
    bits = magnitude.view(torch.int32)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    subnormal = (magnitude + _SUBNORMAL_MAGIC).view(torch.int32) - _SUBNORMAL_MAGIC_BITS
    code = torch.where(magnitude < _SMALLEST_NORMAL, subnormal, normal)
    sign = (x.view(torch.int32) >> 24) & 0x80
    return (code | sign).to(torch.uint8)


def decode(codes: Tensor) -> Tensor:
    """Return the fp32 values of E4M3FN bytes (uint8, any shape)."""
    return _values(codes.device)[codes.int()]


@lru_cache(maxsize=8)
def _values(device: torch.device) -> Tensor:
    """Return the 256 values of E4M3FN, fp32 [256], computed from sign, exponent and mantissa."""
    code = torch.arange(256)
    exponent, mantissa = (code >> 3) & 0xF, (code & 7).double()
    normal = (1 + mantissa / 8) * torch.exp2((exponent - 7).double())
    value = torch.where(exponent == 0, mantissa * 2.0**-9, normal)
    value = torch.where(code & 0x80 != 0, -value, value).float()
    value[[0x7F, 0xFF]] = float("nan")
    return value.to(device)
