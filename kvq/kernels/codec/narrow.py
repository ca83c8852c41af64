"""Scales and minimums of 8 bits, by integer arithmetic, so that every device agrees bit for bit.

A scale byte 8 e + m stands for (8 + m) * 2**(e - 23). Bytes from 8 to 247 are used, which represent 2**-19 to
1,920: shifted to the position of the fp16 exponent, they are finite normal numbers, 32 times as large as the
scale. A minimum byte is a signed number of steps of scale * 2**(bits - 7), so minimums range over 2**bits
scales on either side of zero.
"""

import torch
from torch import Tensor

_EXPONENT = 107  # fp32 exponent at which a scale's exponents begin
_LOWEST = 1 << 20  # the lowest bit that a scale keeps
# D10: scale and minimum take a byte each; scales are rounded up from 5 bits
ROUNDED_UP = 5  # bits of codes from which scales are rounded up: many levels lose more by saturating
_SMALLEST = 2.0**-19
_LARGEST = 1920.0
FP16_LARGEST = 65504.0


def divided(x: Tensor, number: float) -> Tensor:  # D20: not by the reciprocal
    """Return x / number, rounded once; on GPUs, torch would multiply by the reciprocal of a Python number."""
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


def half_minimum(low: Tensor) -> Tensor:  # D19: a minimum is never -0
    """Return `low`, fp32, as an fp16 minimum; -0 becomes 0."""
    return (low.clamp(-FP16_LARGEST, FP16_LARGEST) + 0.0).half()


def scale_codes(wanted: Tensor, *, round_up: bool) -> Tensor:
    """Encode fp32 scales as scale bytes (in int32), rounded to nearest (ties up) or always up."""
    more = _LOWEST - 1 if round_up else _LOWEST // 2
    rounded = wanted.clamp(_SMALLEST, _LARGEST).view(torch.int32) + more
    return ((rounded >> 20) - (_EXPONENT << 3)).clamp(max=247)


def scales(codes: Tensor) -> Tensor:
    """Return the fp32 scales that the int32 bytes `codes` represent."""
    return ((codes << 20) + (_EXPONENT << 23)).view(torch.float32)


def encode(low: Tensor, high: Tensor, bits: int) -> Tensor:
    """Return the scale and minimum, uint8 [..., 2], of groups from `low` to `high`, fp32 [..., 1] each.

    The scale is the larger of the range and the magnitude of `low`, divided by 2**bits - 1. Up to 4 bits, it
    is rounded to nearest, ties up, so codes at the ends may saturate; from 5 bits on, it is rounded up.
    """
    wanted = divided(torch.maximum(high - low, low.abs()), (1 << bits) - 1)
    code = scale_codes(wanted, round_up=bits >= ROUNDED_UP)
    scale = scales(code)
    steps = torch.floor(low * 2.0 ** (7 - bits) / scale + 0.5).clamp(-128, 127).to(torch.int32)
    return torch.cat((code, steps & 255), dim=-1).to(torch.uint8)


def decode(pairs: Tensor, bits: int) -> Tensor:
    """Decode scale and minimum bytes, uint8 [..., 2], into fp32 of the same shape."""
    code, steps = pairs.to(torch.int32).split(1, dim=-1)
    scale = scales(code)
    signed = (steps ^ 128) - 128
    return torch.cat((scale, signed * 2.0 ** (bits - 7) * scale), dim=-1)
