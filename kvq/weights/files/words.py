"""Unsigned codes in 32-bit words, one after the other, low bits first; and AWQ's order of eight in a word."""

import torch
from torch import Tensor
from torch.nn import functional

WORD_BITS = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble k of a word, from its low end, is column AWQ_ORDER[k] of eight


def num_words(count: int, bits: int) -> int:
    """32-bit words that hold `count` codes."""
    return -(-count * bits // WORD_BITS)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """uint8 [rows, n] below 2^bits -> int32 [rows, num_words(n, bits)].

    Code i takes bits i * bits up to (i + 1) * bits of a row, so that 32 codes take `bits` words and a code
    of 3 bits may lie in two of them. Bits that are left over are zero.
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
    return _as_int32(words.flatten(1)[:, : num_words(count, bits)])


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 [rows, num_words(count, bits)] -> uint8 [rows, count]; undoes `pack_words`."""
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
    """uint8 [rows, n] below 16 -> int32 [rows, n / 8], each eight in AWQ's order."""
    rows = codes.shape[0]
    return pack_words(codes.view(rows, -1, 8)[:, :, list(AWQ_ORDER)].flatten(1), 4)


def unpack_awq(words: Tensor) -> Tensor:
    """int32 [rows, n / 8] -> uint8 [rows, n]; undoes `pack_awq`."""
    rows, count = words.shape[0], words.shape[1] * 8
    eights = unpack_words(words, 4, count).view(rows, -1, 8)
    own = torch.empty_like(eights)
    own[:, :, list(AWQ_ORDER)] = eights
    return own.flatten(1)


def _as_int32(words: Tensor) -> Tensor:
    """int64 below 2^32 -> int32 of the same 32 bits."""
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
