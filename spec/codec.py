"""Token rows and whole blocks, from docs/spec.md: numpy alone, nothing of kvq's.

All arithmetic is in fp32, one rounding an operation, in the order that the specification gives.
"""

from dataclasses import replace

import numpy as np
from channels import decode_channels, encode_channels
from names import LARGEST, Format, mean_format
from packing import F32, pack, scale_bytes, scale_values, unpack

SPANS = {"int3": 0.9, "int2": 0.8}
_FLOATS = {"fp32": np.finfo(F32).max, "bf16": F32(float.fromhex("0x1.fep127")), "fp16": F32(65504)}


def hadamard(x: np.ndarray) -> np.ndarray:
    """Rows turned block by block, fp32."""
    dim = x.shape[-1]
    block, h = dim & -dim, 1
    while h < block:
        pairs = x.reshape(*x.shape[:-1], -1, 2, h)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack((low + high, low - high), axis=-2).reshape(*x.shape)
        h *= 2
    return x * F32(block**-0.5)


def prepared(x: np.ndarray, fmt: Format) -> np.ndarray:
    """Rows as they are coded."""
    x = np.where(np.isfinite(x), x, F32(0)).astype(F32)
    if not fmt.rotated:
        return x
    bound = F32(float(np.finfo(F32).max) / (fmt.dim & -fmt.dim))
    return hadamard(np.clip(x, -bound, bound))


def encode(x: np.ndarray, fmt: Format, static=None, clip: float = 1.0):
    """(codes, scales) of fp32 rows [..., dim], uint8 bytes [..., bytes] both."""
    with np.errstate(all="ignore"):
        x = prepared(x, fmt)
        if fmt.code in _FLOATS:
            return _float_bytes(np.clip(x, -_FLOATS[fmt.code], _FLOATS[fmt.code]), fmt.code), _none(x)
        if fmt.group:
            return _encode_grouped(x, fmt, clip)
        if fmt.is_static:
            return _symmetric(x, fmt.code, static), _none(x)
        scale = _fp16_scale(np.abs(x).max(-1, keepdims=True) / F32(LARGEST[fmt.code]))
        return _symmetric(x, fmt.code, scale.astype(F32)), _bytes(scale)


def decode(codes: np.ndarray, scales: np.ndarray, fmt: Format, static=None) -> np.ndarray:
    """fp32 rows [..., dim] of bytes, still rotated."""
    with np.errstate(all="ignore"):
        if fmt.is_per_channel:
            return decode_channels(codes, scales, fmt)
        if fmt.code == "bf16":
            return (_view(codes, "<u2").astype(np.uint32) << 16).view(F32)
        if fmt.code in _FLOATS:
            return _view(codes, {"fp32": "<f4", "fp16": "<f2"}[fmt.code]).astype(F32)
        if fmt.group:
            return _decode_grouped(codes, scales, fmt)
        values = _E4M3[codes] if fmt.code == "fp8" else codes.view(np.int8).astype(F32)
        return values * (static if fmt.is_static else _view(scales, "<f2").astype(F32))


def _bytes(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x.astype(x.dtype.newbyteorder("<"))).view(np.uint8)


def _view(x: np.ndarray, dtype: str) -> np.ndarray:
    return np.ascontiguousarray(x).view(dtype)


def _none(x: np.ndarray) -> np.ndarray:
    return np.zeros((*x.shape[:-1], 0), np.uint8)


def _float_bytes(x: np.ndarray, code: str) -> np.ndarray:
    if code == "bf16":
        bits = x.view(np.uint32)
        return _bytes(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16))
    return _bytes(x if code == "fp32" else x.astype(np.float16))


def _fp16_scale(scale: np.ndarray) -> np.ndarray:
    return np.clip(scale.astype(np.float16).astype(F32), F32(2.0**-24), F32(65504)).astype(np.float16)


def _symmetric(x: np.ndarray, code: str, scale: np.ndarray) -> np.ndarray:
    if code == "fp8":
        return _e4m3(x / scale)
    return np.clip(np.floor(x / scale + F32(0.5)), -127, 127).astype(np.int8).view(np.uint8)


def _e4m3(x: np.ndarray) -> np.ndarray:
    x = np.clip(x, F32(-448), F32(448))
    size = np.abs(x)
    bits = size.view(np.int32)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = np.rint(size * F32(512)).astype(np.int32)
    code = np.where(size < F32(2.0**-6), subnormal, normal)
    return (code | (np.signbit(x) * 0x80)).astype(np.uint8)


def _e4m3_values() -> np.ndarray:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    value = np.where(code & 0x7F == 0x7F, np.nan, np.where(code & 0x80, -value, value))
    return value.astype(F32)


_E4M3 = _e4m3_values()


def _encode_grouped(x: np.ndarray, fmt: Format, clip: float):
    levels, clip = (1 << fmt.bits) - 1, clip * (SPANS.get(fmt.code, 1.0) if fmt.is_narrow else 1.0)
    grouped = x.reshape(*x.shape[:-1], -1, fmt.group)
    low, high = grouped.min(-1, keepdims=True), grouped.max(-1, keepdims=True)
    if clip != 1.0:
        part = F32((1 - clip) / 2)
        cut = high * part - low * part
        low, high = low + cut, high - cut
    if fmt.is_narrow:
        pairs = _narrow_pairs(low, high, fmt.bits)
        scale, minimum = np.split(_narrow_values(pairs, fmt.bits), 2, axis=-1)
    else:
        least = (np.clip(low, F32(-65504), F32(65504)) + F32(0)).astype(np.float16)
        step = _fp16_scale((high - least.astype(F32)) / F32(levels))
        pairs = _bytes(np.concatenate((step, least), -1))
        scale, minimum = step.astype(F32), least.astype(F32)
    q = np.clip(np.floor((grouped - minimum) / scale + F32(0.5)), 0, levels).astype(np.uint8)
    return pack(q.reshape(x.shape), fmt.bits), pairs.reshape(*x.shape[:-1], -1)


def _narrow_pairs(low: np.ndarray, high: np.ndarray, bits: int) -> np.ndarray:
    code = scale_bytes(np.maximum(high - low, np.abs(low)) / F32((1 << bits) - 1), up=bits >= 5)
    scale = scale_values(code)
    steps = np.clip(np.floor(low * F32(2.0 ** (7 - bits)) / scale + F32(0.5)), -128, 127).astype(np.int32)
    return np.concatenate((code, steps & 255), -1).astype(np.uint8)


def _narrow_values(pairs: np.ndarray, bits: int) -> np.ndarray:
    scale, steps = scale_values(pairs[..., :1]), np.ascontiguousarray(pairs[..., 1:]).view(np.int8)
    return np.concatenate((scale, steps.astype(F32) * F32(2.0 ** (bits - 7)) * scale), -1)


def _decode_grouped(codes: np.ndarray, scales: np.ndarray, fmt: Format) -> np.ndarray:
    if fmt.is_narrow:
        pairs = _narrow_values(scales.reshape(*scales.shape[:-1], -1, 2), fmt.bits)
    else:
        pairs = _view(scales, "<f2").astype(F32).reshape(*scales.shape[:-1], -1, 2)
    q = unpack(codes, fmt.bits).astype(F32).reshape(*codes.shape[:-1], -1, fmt.group)
    return (q * pairs[..., :1] + pairs[..., 1:]).reshape(*codes.shape[:-1], fmt.dim)


def encode_block(x: np.ndarray, fmt: Format, static=None, clip: float = 1.0):
    """(codes, scales, means) of the rows of a block, [..., block_size, dim]."""
    if fmt.is_per_channel:
        with np.errstate(all="ignore"):
            return *encode_channels(prepared(x, fmt), fmt), _none(x[..., 0, :])
    if not fmt.mean:
        return *encode(x, fmt, static, clip), _none(x[..., 0, :])
    with np.errstate(all="ignore"):
        x = prepared(x, fmt)
        total = x[..., 0, :].copy()
        for token in range(1, x.shape[-2]):
            total = total + x[..., token, :]
        stored = mean_format(fmt.dim)
        means = encode(total / F32(x.shape[-2]), stored)
        codes, scales = encode(
            x - decode(*means, stored)[..., None, :], replace(fmt, rotated=False), clip=clip
        )
    return codes, scales, np.concatenate(means, -1)
