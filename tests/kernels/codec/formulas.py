"""The formulas of grouped formats, written out again in numpy: what rows must be coded to."""

import math

import numpy as np
import torch
from torch import Tensor

F32, F16 = np.float32, np.float16
SMALLEST, LARGEST = F16(2.0**-24), F16(65504.0)
SPANS = {2: 0.8, 3: 0.9}  # with scales of 8 bits; of wider codes the whole range
HEAD_DIMS = [48, 60, 64, 80, 96, 128, 192, 256]


def tame(dim: int, seed: int = 0) -> Tensor:
    """Rows like K and V: spreads from 0.01 to 30, some offset, some all positive. fp32 [21, 3, dim]."""
    source = torch.Generator().manual_seed(seed + dim)
    x = torch.randn(21, 3, dim, generator=source)
    x *= torch.logspace(-2, 1.5, 21)[:, None, None]
    x[::4] += 5.0
    x[1::4] = x[1::4].abs()
    x[..., 3] *= 8  # an outlier channel
    return x


def fp16_scale(value: np.float32) -> np.float16:
    """clamp(fp16(value), 2**-24, 65504)"""
    with np.errstate(over="ignore", under="ignore"):
        return min(max(F16(value), SMALLEST), LARGEST)


def narrow_scale(value: np.float32, bits: int) -> int:
    """The byte 8 e + m whose (8 + m) * 2**(e - 23) is nearest to `value`, halves up; from 5 bits on above."""
    within = min(max(float(value), 2.0**-19), 1920.0)
    exponent = math.frexp(within)[1] - 4  # within / 2**exponent is from 8 to 16
    parts = within / 2.0**exponent  # 16 begins the next exponent
    parts = math.ceil(parts) if bits >= 5 else math.floor(parts + 0.5)
    return min(8 * (exponent + 23) + parts - 8, 247)


def narrow_value(byte: int) -> float:
    return (8 + byte % 8) * 2.0 ** (byte // 8 - 23)


def _narrow_pair(low: np.float32, high: np.float32, bits: int) -> tuple[int, int, np.float32, np.float32]:
    """Bytes of scale and minimum, and what they stand for."""
    with np.errstate(over="ignore"):  # ranges beyond fp32's are clamped as infinity is
        wanted = max(high - low, abs(low)) / F32((1 << bits) - 1)
        scale = narrow_scale(wanted, bits)
        steps = math.floor(
            min(max(float(low * F32(2.0 ** (7 - bits)) / F32(narrow_value(scale))), -1e6), 1e6) + 0.5
        )
    steps = min(max(steps, -128), 127)
    return scale, steps % 256, F32(narrow_value(scale)), F32(steps * 2.0 ** (bits - 7) * narrow_value(scale))


def grouped_row(
    row: np.ndarray, bits: int, size: int, *, narrow: bool
) -> tuple[np.ndarray, list[float], Tensor]:
    """One token row, fp32 [dim]: codes [dim], what is stored of its groups, the row it decodes to."""
    codes, stored, decoded = [], [], []
    levels = (1 << bits) - 1
    for at in range(0, len(row), size):
        group = row[at : at + size].astype(F32)
        low, high = group.min(), group.max()
        if narrow:
            cut = F32((1 - SPANS.get(bits, 1.0)) / 2)
            rest = high * cut - low * cut
            scale, minimum, s, m = _narrow_pair(low + rest, high - rest, bits)
            stored += [float(scale), float(minimum)]
        else:
            minimum = F16(min(max(low, F32(-65504.0)), F32(65504.0)))
            s16 = fp16_scale((high - F32(minimum)) / F32(levels))
            s, m = F32(s16), F32(minimum)
            stored += [float(s16), float(minimum)]
        q = np.clip(np.floor((group - m) / s + F32(0.5)), 0, levels)
        codes.append(q.astype(int))
        decoded.append(q.astype(F32) * s + m)
    return np.concatenate(codes), stored, torch.from_numpy(np.concatenate(decoded))


def packed_row(codes: np.ndarray, bits: int) -> list[int]:
    """Planes of 4, 2, 1 bits; byte i of one holds elements i, i + dim/p, ... from its low bits up."""
    packed, shift = [], 0
    for width in (4, 2, 1):
        if not bits & width:
            continue
        plane = (codes >> shift) & ((1 << width) - 1)
        parts, step = 8 // width, len(codes) * width // 8
        packed += [sum(int(plane[i + p * step]) << (width * p) for p in range(parts)) for i in range(step)]
        shift += width
    return packed
