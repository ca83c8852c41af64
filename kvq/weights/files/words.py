"""Packing of integer codes for files: 32-bit words, with inputs in their original order.

Words contain consecutive unsigned codes, low bits first, or eight codes in AWQ's order.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kvq.errors import ConfigError
from kvq.kernels.weight import QuantizedWeight


def own_order(weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """Return integer codes int8 [out, in] and each input's group, int32 [in], in the original order."""
    q, groups = weight.integers(), weight.scale.shape[1]
    index = torch.arange(weight.in_features, device=q.device) // (weight.in_features // groups)
    if weight.order is not None:
        q = torch.empty_like(q).index_copy_(1, weight.order, q)
        index = torch.empty_like(index).index_copy_(0, weight.order, index)
    return q, index.to(torch.int32)


def whole_groups(name: str, weight: QuantizedWeight) -> Tensor:
    """Return the codes for a file format that stores no order of inputs.

    Raises:
        ConfigError: the inputs of some group are not adjacent.
    """
    q, index = own_order(weight)
    if (index.diff() < 0).any():
        raise ConfigError(
            f"{name}: this file format can't hold groups of scattered inputs (act-order); "
            f"write autogptq, or quantize without act-order"
        )
    return q


def check_fp16_scales(name: str, weight: QuantizedWeight, program: str) -> None:
    """Raise ConfigError unless the scales are fp16, as in files of GPTQ and AWQ."""
    if weight.scale.dtype is not torch.float16:
        got = weight.scale.dtype
        raise ConfigError(f"{name}: {program} keeps fp16 scales, got {got}; quantize with fp16 scales")


def offset(q: Tensor, bits: int) -> Tensor:
    """Map int8 codes or zero points to uint8 from 0 to 2^bits - 1."""
    return (q.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)


def signed(codes: Tensor, bits: int) -> Tensor:
    """Map uint8 to int8, the inverse of `offset`."""
    return (codes.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)


WORD_BITS = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble k of a word, from its low end, is column AWQ_ORDER[k] of eight


def num_words(count: int, bits: int) -> int:
    """Return the number of 32-bit words for `count` codes."""
    return -(-count * bits // WORD_BITS)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 [rows, n] below 2^bits into int32 [rows, num_words(n, bits)].

    Code i occupies bits i * bits up to (i + 1) * bits of a row: 32 codes occupy `bits` words, and a 3-bit
    code may span two words. Unused bits are zero.
    """
    rows, count = codes.shape
    padded = functional.pad(codes, (0, -count % WORD_BITS)).view(rows, -1, WORD_BITS)
    words = torch.zeros(rows, padded.shape[1], bits, dtype=torch.int64, device=codes.device)
    for i in range(WORD_BITS):
        word, shift = divmod(i * bits, WORD_BITS)
        code = padded[:, :, i].long()
        words[:, :, word] |= (code << shift) & 0xFFFFFFFF
        if shift + bits > WORD_BITS:
            words[:, :, word + 1] |= code >> (WORD_BITS - shift)
    words = words.flatten(1)[:, : num_words(count, bits)]
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)  # the same 32 bits


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpack int32 [rows, num_words(count, bits)] into uint8 [rows, count], the inverse of `pack_words`."""
    rows = words.shape[0]
    groups = functional.pad(words, (0, -words.shape[1] % bits)).view(rows, -1, bits).long() & 0xFFFFFFFF
    codes = torch.empty(rows, groups.shape[1], WORD_BITS, dtype=torch.uint8, device=words.device)
    for i in range(WORD_BITS):
        word, shift = divmod(i * bits, WORD_BITS)
        code = groups[:, :, word] >> shift
        if shift + bits > WORD_BITS:
            code = code | (groups[:, :, word + 1] << (WORD_BITS - shift))
        codes[:, :, i] = (code & ((1 << bits) - 1)).to(torch.uint8)
    return codes.flatten(1)[:, :count].contiguous()


def pack_awq(codes: Tensor) -> Tensor:
    """Pack uint8 [rows, n] below 16 into int32 [rows, n / 8], every eight codes in AWQ's order."""
    rows = codes.shape[0]
    return pack_words(codes.view(rows, -1, 8)[:, :, list(AWQ_ORDER)].flatten(1), 4)


def unpack_awq(words: Tensor) -> Tensor:
    """Unpack int32 [rows, n / 8] into uint8 [rows, n], the inverse of `pack_awq`."""
    rows, count = words.shape[0], words.shape[1] * 8
    eights = unpack_words(words, 4, count).view(rows, -1, 8)
    own = torch.empty_like(eights)
    own[:, :, list(AWQ_ORDER)] = eights
    return own.flatten(1)
