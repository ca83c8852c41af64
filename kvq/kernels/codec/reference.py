"""Reference encoder and decoder of every format: the definition of correct results.

Token rows are the last dimension. `encode` returns codes and scales in the form that blocks store:

    code            codes                       scales
    fp32 bf16 fp16  that dtype [..., dim]       none
    fp8, int8       uint8 / int8 [..., dim]     fp16 [..., 1] per token row; none if static
    grouped         uint8 [..., dim*bits/8]     fp16 [..., 2*groups]: scale, minimum, scale, ...
    grouped, _s8    the same                    uint8 [..., 2*groups]: scale, minimum, scale, ...
    per channel     see channel.py: scales belong to whole blocks

`packing` describes how grouped codes are packed into bytes.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kvq.formats import Code, Grouped, KVFormat, mean_format
from kvq.kernels.codec import e4m3, narrow
from kvq.kernels.codec.channel import decode_channels, encode_channels
from kvq.kernels.codec.hadamard import hadamard_block, rotate
from kvq.kernels.codec.packing import pack, unpack

_DTYPES = {
    Code.FP32: torch.float32,
    Code.BF16: torch.bfloat16,
    Code.FP16: torch.float16,
    Code.FP8: torch.uint8,
    Code.INT8: torch.int8,
}
_FP32_LARGEST = torch.finfo(torch.float32).max
_SMALLEST_SCALE = 2.0**-24


def code_dtype(code: Code) -> torch.dtype:
    """Return the dtype in which codes are stored; uint8 for packed codes."""
    return torch.uint8 if code.is_grouped else _DTYPES[code]


def encode(
    x: Tensor, fmt: KVFormat, static_scale: Tensor | None = None, *, clip: float = 1.0
) -> tuple[Tensor, Tensor | None]:
    """Quantize token rows.

    `x`: [..., dim], any float dtype; finite elements saturate, NaN and infinity are stored as zero
    (`write_kv` returns flags for these rows). `static_scale`: fp32, broadcastable to [..., 1], for per-head
    formats. `clip`: the fraction of each group's range, around its middle, that the codes span; elements
    outside it saturate. Returns (codes, scales), laid out as in the table above.
    """
    x = prepared(x, fmt)
    if fmt.own is not None:
        x = fmt.own.through(x)
    if fmt.code.is_float:
        dtype = code_dtype(fmt.code)
        largest = torch.finfo(dtype).max
        return x.clamp(-largest, largest).to(dtype), None
    if isinstance(fmt.scale, Grouped):
        return _encode_grouped(x, fmt, fmt.scale.group_size, clip * fmt.span)
    if fmt.is_static:
        assert static_scale is not None, f"{fmt.name} needs a static scale"
        return _encode_symmetric(x, fmt.code, static_scale), None
    scale = _clamp_fp16(narrow.divided(x.abs().amax(dim=-1, keepdim=True), fmt.code.largest))  # [..., 1]
    return _encode_symmetric(x, fmt.code, scale.float()), scale


def prepared(x: Tensor, fmt: KVFormat) -> Tensor:  # D18: rows are clamped before a rotation
    """Return rows preprocessed for encoding, fp32 [..., dim]: finite, and rotated if the format rotates."""
    x = x.float()
    x = torch.where(torch.isfinite(x), x, 0.0)
    if not fmt.rotated:
        return x
    bound = _FP32_LARGEST / hadamard_block(x.shape[-1])  # no butterfly can overflow
    return rotate(x.clamp(-bound, bound))


def decode(codes: Tensor, scales: Tensor | None, fmt: KVFormat, static_scale: Tensor | None = None) -> Tensor:
    """Return the fp32 rows [..., dim] that codes and scales represent, still rotated if `fmt` rotates."""
    if fmt.code.is_float:
        return codes.float()
    if fmt.is_per_channel:
        assert scales is not None, f"{fmt.name} stores scales"
        return decode_channels(codes, scales, fmt)
    if isinstance(fmt.scale, Grouped):
        assert scales is not None, f"{fmt.name} stores scales"
        return _decode_grouped(codes, scales, fmt)
    scale = static_scale if fmt.is_static else scales
    assert scale is not None, f"{fmt.name} needs scales"
    values = e4m3.decode(codes) if fmt.code is Code.FP8 else codes.float()
    return values * scale.float()


def _clamp_fp16(scale: Tensor) -> Tensor:  # D14: static scales stay at the maximum
    """clamp(fp16(scale), 2**-24, 65504)."""
    return scale.half().float().clamp(_SMALLEST_SCALE, narrow.FP16_LARGEST).half()


def _encode_symmetric(x: Tensor, code: Code, scale: Tensor) -> Tensor:
    if code is Code.FP8:
        return e4m3.encode(x / scale)
    return torch.floor(x / scale + 0.5).clamp(-127, 127).to(torch.int8)


def _encode_grouped(x: Tensor, fmt: KVFormat, group_size: int, clip: float) -> tuple[Tensor, Tensor]:  # D9
    """m = fp16(min), s = clamp(fp16((max - m) / levels)), q = clamp(floor((x - m) / s + 0.5)).

    With scales of 8 bits, `narrow.encode` computes m and s from minimum and maximum.
    """
    code = fmt.code
    levels = (1 << code.bits) - 1
    grouped = x.unflatten(-1, (-1, group_size))  # [..., groups, group_size]
    low, high = grouped.aminmax(dim=-1, keepdim=True)
    if clip != 1.0:
        cut = high * ((1 - clip) / 2) - low * ((1 - clip) / 2)  # high - low might overflow
        low, high = low + cut, high - cut
    if fmt.is_narrow:
        pairs = narrow.encode(low, high, code.bits)
        scale, minimum = narrow.decode(pairs, code.bits).split(1, dim=-1)
    else:
        minimum = narrow.half_minimum(low)
        scale = _clamp_fp16(narrow.divided(high - minimum.float(), levels))
        pairs = torch.cat((scale, minimum), dim=-1)
    q = torch.floor((grouped - minimum.float()) / scale.float() + 0.5).clamp(0, levels)
    codes = pack(q.to(torch.uint8).flatten(-2), code)
    return codes, pairs.flatten(-2)


def _decode_grouped(codes: Tensor, scales: Tensor, fmt: KVFormat) -> Tensor:  # D17
    pairs = scales.unflatten(-1, (-1, 2))  # [..., groups, (scale, minimum)]
    pairs = narrow.decode(pairs, fmt.code.bits) if fmt.is_narrow else pairs.float()
    q = unpack(codes, fmt.code).float().unflatten(-1, (pairs.shape[-2], -1))
    rows: Tensor = (q * pairs[..., :1] + pairs[..., 1:]).flatten(-2)
    return rows


def encode_block(  # D13: the block's own mean, in INT4
    x: Tensor, fmt: KVFormat, static_scale: Tensor | None = None, *, clip: float = 1.0
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Quantize the rows of a block, [..., block_size, dim], as `encode` does. Returns (codes, scales, means).

    Per-channel scales are one row for the whole block: [..., 1, bytes]. `means`: uint8 [..., bytes of a
    mean]; None unless the format has block means. A mean is computed from the rows to be encoded, rotated if
    the format rotates: their fp32 sum, added token by token, divided by their number. The mean is stored in
    `mean_format`, codes before scales, and its decoded value is subtracted from every row.
    """
    if fmt.is_per_channel:
        return *encode_channels(prepared(x, fmt), fmt), None
    if not fmt.mean:
        return *encode(x, fmt, static_scale, clip=clip), None
    x = prepared(x, fmt)
    total = x[..., 0, :].clone()
    for token in range(1, x.shape[-2]):
        total += x[..., token, :]
    stored = mean_format(x.shape[-1])
    means = encode(narrow.divided(total, x.shape[-2]), stored)
    assert means[1] is not None, f"{stored.name} stores scales"
    left = x - decode(*means, stored)[..., None, :]
    codes, scales = encode(left, replace(fmt, rotated=False), clip=clip)
    return codes, scales, torch.cat((means[0], means[1]), dim=-1)


def decode_means(means: Tensor, dim: int) -> Tensor:
    """Return the fp32 means [..., dim] that `encode_block` stored."""
    fmt = mean_format(dim)
    codes, scales = means.split([fmt.code_bytes(dim), fmt.scale_bytes(dim)], dim=-1)
    return decode(codes, scales, fmt)
