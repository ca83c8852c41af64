"""Codes in planes of bytes, and scales of a byte, from docs/spec.md."""

import numpy as np

F32 = np.float32


def planes(bits: int) -> list[int]:
    """The widths of the planes that codes lie in."""
    return [width for width in (8, 4, 2, 1) if bits & width]


def pack(q: np.ndarray, bits: int) -> np.ndarray:
    """Codes [..., dim] in planes of bytes."""
    found, shift = [], 0
    for width in planes(bits):
        parts = np.split((q >> shift) & ((1 << width) - 1), 8 // width, axis=-1)
        found.append(sum(part << (width * i) for i, part in enumerate(parts)).astype(np.uint8))
        shift += width
    return np.concatenate(found, -1)


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """Codes [..., dim] of planes."""
    dim = packed.shape[-1] * 8 // bits
    codes, shift, at = np.zeros((*packed.shape[:-1], dim), np.uint8), 0, 0
    for width in planes(bits):
        size = dim * width // 8
        plane = packed[..., at : at + size]
        parts = [(plane >> (width * i)) & ((1 << width) - 1) for i in range(8 // width)]
        codes |= np.concatenate(parts, -1) << shift
        shift, at = shift + width, at + size
    return codes


def scale_bytes(wanted: np.ndarray, *, up: bool) -> np.ndarray:
    """The bytes, int32, of fp32 scales: the next that is not below, or the nearest."""
    rounded = np.clip(wanted, F32(2.0**-19), F32(1920)).view(np.int32) + ((1 << 20) - 1 if up else 1 << 19)
    return np.minimum((rounded >> 20) - (107 << 3), 247)


def scale_values(code: np.ndarray) -> np.ndarray:
    """The scales, fp32, of bytes."""
    return ((code.astype(np.int32) << 20) + (107 << 23)).astype(np.int32).view(F32)
