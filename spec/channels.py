"""Scales per channel of a block, from docs/spec.md: rows are fp32 [..., block_size, dim], finite."""

import numpy as np
from names import Format
from packing import F32, pack, scale_bytes, scale_values, unpack


def encode_channels(x: np.ndarray, fmt: Format) -> tuple[np.ndarray, np.ndarray]:
    """(codes, scales) of blocks, uint8 bytes [..., block_size, bytes] and [..., 1, bytes]."""
    low, high = x.min(-2, keepdims=True), x.max(-2, keepdims=True)
    if fmt.code == "int8":
        center = low * F32(0.5) + high * F32(0.5)
        wanted = np.maximum((high * F32(0.5) - low * F32(0.5)) / F32(119), np.abs(center) / F32(2032))
        code = scale_bytes(wanted, up=True)
        s = scale_values(code)
        steps = np.clip(np.floor(center / (s * F32(16)) + F32(0.5)), -127, 127)
        q = np.clip(np.floor((x - steps * F32(16) * s) / s + F32(0.5)), -127, 127)
        scales = np.concatenate((code, steps.astype(np.int32) & 255), -1).astype(np.uint8)
        return q.astype(np.int8).view(np.uint8), scales
    least = (np.clip(low, F32(-65504), F32(65504)) + F32(0)).astype(np.float16)
    code = scale_bytes((high - least.astype(F32)) / F32((1 << fmt.bits) - 1), up=fmt.bits >= 5)
    scales = np.concatenate((code.astype(np.uint8), least.astype("<f2").view(np.uint8)), -1)
    s, m, bits = _decoded(scales, fmt)
    q = np.clip(np.floor((x - m) / s + F32(0.5)), 0, (1 << bits) - 1).astype(np.int32)
    if not fmt.is_paired:
        return pack(q.astype(np.uint8), fmt.bits), scales
    half = fmt.dim // 2
    words = q[..., :half] + (q[..., ::-1][..., :half] << bits[..., :half])
    return pack(words.astype(np.uint8), 2 * fmt.bits), scales


def decode_channels(codes: np.ndarray, scales: np.ndarray, fmt: Format) -> np.ndarray:
    """fp32 rows [..., block_size, dim] of bytes, still rotated."""
    s, m, bits = _decoded(scales, fmt)
    if fmt.code == "int8":
        return codes.view(np.int8).astype(F32) * s + m
    if not fmt.is_paired:
        return unpack(codes, fmt.bits).astype(F32) * s + m
    words, own = unpack(codes, 2 * fmt.bits).astype(np.int32), bits[..., : fmt.dim // 2]
    q = np.concatenate((words % (1 << own), (words >> own)[..., ::-1]), -1)
    return q.astype(F32) * s + m


def _decoded(scales: np.ndarray, fmt: Format) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scale, offset and bits of every channel, [..., 1, dim] each."""
    code, rest = scales[..., : fmt.dim], np.ascontiguousarray(scales[..., fmt.dim :])
    s = scale_values(code)
    if fmt.code == "int8":
        return s, rest.view(np.int8).astype(F32) * F32(16) * s, np.full(code.shape, 8)
    bits = _shares(code.astype(np.int32), fmt.bits) if fmt.is_paired else np.full(code.shape, fmt.bits)
    factors = ((1 << fmt.bits) - 1) / ((1 << bits) - 1)  # in double precision
    return s * factors.astype(F32), rest.view("<f2").astype(F32), bits


def _shares(code: np.ndarray, bits: int) -> np.ndarray:
    more = code - code[..., ::-1]
    return bits + np.sign(more) * np.minimum((np.abs(more) + 8) // 16, min(2, bits - 1))
