"""Reference encoder and decoder for per-channel scales: the definition of correct results.

A channel is the same element in all rows of a block. Its scale is a byte (see narrow.py). The scales of all
channels come first, then their offsets:

    code       scales of a block, per KV head                   an element is
    int8       uint8 [dim] scales, int8 [dim] steps             code * scale + 16 * step * scale
    grouped    uint8 [dim] scales, fp16 [dim] minimums          code * scale + minimum

Grouped codes of up to 4 bits are stored in pairs: channels i and dim - 1 - i together have twice the bits,
which `shares` divides between them according to their scale bytes. A channel whose range is four times the
other's takes one bit from it; at most two bits are moved. RoPE rotates one channel fast and the other slowly,
so their ranges differ. The scale byte is stored for a code of `bits` bits; the actual scale is derived from
it and the share. Element i of a row of dim / 2 codes, packed with twice the bits, has channel i in its low
bits and channel dim - 1 - i above them.
"""

import torch
from torch import Tensor

from kvq.formats import Code, KVFormat
from kvq.kernels.codec import narrow
from kvq.kernels.codec.packing import pack, unpack

MOST_SHIFTED = 2  # bits that one channel of a pair takes from the other
# D3: a byte for the scale; offsets need fp16
CENTER_STEP = 16  # unit of INT8's offsets, in scales
INT8_REACH = 127 - CENTER_STEP // 2  # codes from a range's middle to its end, if the middle is rounded


def encode_channels(x: Tensor, fmt: KVFormat) -> tuple[Tensor, Tensor]:
    """Quantize the rows of complete blocks, fp32 [..., block_size, dim], finite. Returns (codes, scales).

    `codes`: [..., block_size, row], as for `encode`; `scales`: uint8 [..., 1, bytes of a block].
    """
    low, high = x.aminmax(dim=-2, keepdim=True)  # [..., 1, dim]
    if fmt.code is Code.INT8:
        center = low * 0.5 + high * 0.5
        reach = narrow.divided(high * 0.5 - low * 0.5, INT8_REACH)
        wanted = torch.maximum(reach, narrow.divided(center.abs(), 127 * CENTER_STEP))
        scale_codes = narrow.scale_codes(wanted, round_up=True)
        scale = narrow.scales(scale_codes)
        steps = torch.floor(center / (scale * CENTER_STEP) + 0.5).clamp(-127, 127)
        codes = torch.floor((x - steps * CENTER_STEP * scale) / scale + 0.5).clamp(-127, 127).to(torch.int8)
        return codes, torch.cat((scale_codes, steps.to(torch.int32) & 255), dim=-1).to(torch.uint8)
    minimum = narrow.half_minimum(low)
    wanted = narrow.divided(high - minimum.float(), (1 << fmt.code.bits) - 1)
    scale_codes = narrow.scale_codes(wanted, round_up=fmt.code.bits >= narrow.ROUNDED_UP)
    scales = torch.cat((scale_codes.to(torch.uint8), minimum.view(torch.uint8)), dim=-1)
    scale, offset, bits = decoded_scales(scales, fmt)
    q = torch.floor((x - offset) / scale + 0.5)
    q = torch.minimum(q.clamp(min=0), (1 << bits) - 1.0).to(torch.int32)
    if not fmt.is_paired:
        return pack(q.to(torch.uint8), fmt.code), scales
    low_q, high_q = q.chunk(2, dim=-1)
    words = low_q | (high_q.flip(-1) << bits.chunk(2, dim=-1)[0])
    return pack(words.to(torch.uint8), fmt.code.doubled), scales


def decode_channels(codes: Tensor, scales: Tensor, fmt: KVFormat) -> Tensor:
    """Return fp32 rows [..., tokens, dim] from codes [..., tokens, row], scales [..., 1 or tokens, bytes]."""
    scale, offset, bits = decoded_scales(scales, fmt)
    if fmt.code is Code.INT8:
        q = codes.float()
    elif fmt.is_paired:
        words = unpack(codes, fmt.code.doubled).to(torch.int32)
        own = bits.chunk(2, dim=-1)[0]
        q = torch.cat((words & ((1 << own) - 1), (words >> own).flip(-1)), dim=-1).float()
    else:
        q = unpack(codes, fmt.code).float()
    rows: Tensor = q * scale + offset
    return rows


def decoded_scales(scales: Tensor, fmt: KVFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Return each channel's scale and offset, fp32, and its bits, int32: [..., dim] each."""
    if fmt.code is Code.INT8:
        codes, steps = scales.to(torch.int32).chunk(2, dim=-1)
        scale = narrow.scales(codes)
        offset = ((steps ^ 128) - 128) * CENTER_STEP * scale
        return scale, offset, torch.full_like(codes, fmt.code.bits)
    dim = scales.shape[-1] // 3
    codes = scales[..., :dim].to(torch.int32)
    offset = scales[..., dim:].contiguous().view(torch.float16).float()
    bits = shares(codes, fmt.code.bits) if fmt.is_paired else torch.full_like(codes, fmt.code.bits)
    levels = [max(1, (1 << own) - 1) for own in range(fmt.code.bits + MOST_SHIFTED + 1)]
    factors = [((1 << fmt.code.bits) - 1) / own for own in levels]  # of the scale, by a channel's actual bits
    by_bits = torch.tensor(factors, dtype=torch.float32, device=scales.device)
    return narrow.scales(codes) * by_bits[bits.long()], offset, bits


def shares(codes: Tensor, bits: int) -> Tensor:  # D4: two channels share their bits by their scale bytes
    """Return each channel's bits, int32 [..., dim], from its pair's scale bytes (8 are a factor of 2)."""
    more = codes - codes.flip(-1)
    most = min(MOST_SHIFTED, bits - 1)
    return bits + more.sign() * ((more.abs() + 8) >> 4).clamp(max=most)
