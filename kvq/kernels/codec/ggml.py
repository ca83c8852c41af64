"""Values of GGUF's blocks in torch: the definition to which kernels that multiply blocks are compared.

A block holds scales and minima, in 16 bits or fewer, and codes, packed in nibbles, pairs of bits and single
bits. Every product is rounded to fp32, scale times scale first. Source: ggml's `ggml-quants.c`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvq.formats.ggml import GgmlType

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # of IQ4_NL
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # of MXFP4, times two
_PIECE = 1 << 22  # values at a time


def dequantize(blocks: Tensor, kind: GgmlType) -> Tensor:
    """Return the values of rows of blocks: uint8 [rows, row_bytes] -> fp32 [rows, in].

    F16 and BF16 keep their dtype, and the result may share memory with `blocks`.
    """
    if kind.is_float:
        return _floats(blocks, FLOATS[kind.name])
    rows = blocks.shape[0]
    count = blocks.shape[1] // kind.nbytes * kind.values
    values = torch.empty(rows, count, dtype=torch.float32, device=blocks.device)
    step = max(1, _PIECE // count)
    for at in range(0, rows, step):
        piece = blocks[at : at + step].reshape(-1, kind.nbytes)
        values[at : at + step] = _DECODERS[kind.name](piece).view(-1, count)
    return values


def _floats(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """View bytes as floats; bytes at odd addresses are copied."""
    is_aligned = raw.data_ptr() % dtype.itemsize == raw.storage_offset() % dtype.itemsize == 0
    return (raw if raw.is_contiguous() and is_aligned else raw.clone()).view(dtype)


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the fp16 number at byte `at` of each block: fp32 [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(codes: Tensor) -> Tensor:
    """uint8 [..., n] -> [..., 2 n]: all low nibbles, then all high ones."""
    return torch.cat((codes & 15, codes >> 4), -1)


def _bits(packed: Tensor) -> Tensor:
    """Bits of uint8 [..., n], from the lowest of the first byte on: [..., 8 n]."""
    return ((packed[..., None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1).flatten(-2)


def _planes(packed: Tensor, bits: int) -> Tensor:
    """uint8 [..., n] -> [..., 8 / bits, n]: the lowest bits of all bytes, then the next ones."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return (packed[..., None, :] >> shifts[:, None]) & ((1 << bits) - 1)


def _q2_k(b: Tensor) -> Tensor:
    codes = _planes(b[:, 16:80].view(-1, 2, 32), 2).reshape(-1, 16, 16).float()
    scales = (_half(b, 80) * (b[:, :16] & 15).float())[..., None]
    minima = (_half(b, 82) * (b[:, :16] >> 4).float())[..., None]
    return (scales * codes - minima).flatten(1)


def _q3_k(b: Tensor) -> Tensor:
    low, high = _nibbles(b[:, 96:104]), _planes(b[:, 104:108], 2).flatten(1)
    scales = _half(b, 108) * ((low | high << 4).float() - 32)
    codes = _planes(b[:, 32:96].view(-1, 2, 32), 2).reshape(-1, 8, 32).float()
    codes = codes - 4 * (1 - _planes(b[:, :32], 1).float())  # a bit that is not set: 4 less
    return (scales[..., None] * codes.view(-1, 16, 16)).flatten(1)


def scale_codes(b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 8 scales and minima of Q4_K or Q5_K blocks, without their blocks': uint8 [blocks, 8]."""
    first, second, third = b[:, 4:16].view(-1, 3, 4).unbind(1)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), 1)
    return scales, torch.cat((second & 63, third >> 4 | second >> 6 << 4), 1)


def _scales_and_minima(b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 8 scales and minima of a Q4_K or Q5_K block, each times its block's: fp32 [blocks, 8, 1]."""
    scales, minima = scale_codes(b)
    return (_half(b, 0) * scales.float())[..., None], (_half(b, 2) * minima.float())[..., None]


def _q4_k(b: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(b)
    codes = _planes(b[:, 16:].view(-1, 4, 32), 4).reshape(-1, 8, 32).float()
    return (scales * codes - minima).flatten(1)


def _q5_k(b: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(b)
    codes = _planes(b[:, 48:].view(-1, 4, 32), 4).reshape(-1, 8, 32) | _planes(b[:, 16:48], 1) << 4
    return (scales * codes.float() - minima).flatten(1)


def six_bits(b: Tensor) -> Tensor:
    """Return the codes of Q6_K blocks, from 0 on: uint8 [blocks, 256]."""
    low = _planes(b[:, :128].view(-1, 2, 64), 4).flatten(1)
    return low | _planes(b[:, 128:192].view(-1, 2, 32), 2).flatten(1) << 4


def _q6_k(b: Tensor) -> Tensor:
    scales = _half(b, 208) * b[:, 192:208].contiguous().view(torch.int8).float()
    return (scales[..., None] * (six_bits(b).float() - 32).view(-1, 16, 16)).flatten(1)


def _mxfp4(b: Tensor) -> Tensor:
    halves = torch.ldexp(torch.ones_like(b[:, :1], dtype=torch.float32), b[:, :1].int() - 128)  # of scales
    return halves * _looked_up(_E2M1, b[:, 1:])


def _looked_up(table: tuple[int, ...], codes: Tensor) -> Tensor:
    return torch.tensor(table, dtype=torch.float32, device=codes.device)[_nibbles(codes).long()]


_DECODERS: dict[str, Callable[[Tensor], Tensor]] = {  # uint8 [blocks, nbytes] -> fp32 [blocks, values]
    "Q4_0": lambda b: _half(b, 0) * (_nibbles(b[:, 2:]).float() - 8),
    "Q4_1": lambda b: _half(b, 0) * _nibbles(b[:, 4:]).float() + _half(b, 2),
    "Q5_0": lambda b: _half(b, 0) * ((_nibbles(b[:, 6:]) | _bits(b[:, 2:6]) << 4).float() - 16),
    "Q5_1": lambda b: _half(b, 0) * (_nibbles(b[:, 8:]) | _bits(b[:, 4:8]) << 4).float() + _half(b, 2),
    "Q8_0": lambda b: _half(b, 0) * b[:, 2:].contiguous().view(torch.int8).float(),
    "IQ4_NL": lambda b: _half(b, 0) * _looked_up(_NON_LINEAR, b[:, 2:]),
    **{"Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "MXFP4": _mxfp4},
}
