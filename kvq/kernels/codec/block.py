"""Reference encoder and decoder of whole blocks: scales may be per channel, or a mean may be taken out.

The mean is of the rows as they are coded, rotated where the format rotates: their sum in fp32, token after
token, over their number. It is stored in `mean_format`, codes and then scales, and what it decodes to is
taken from every row.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kvq.formats import KVFormat, mean_format
from kvq.kernels.codec.channel import encode_channels
from kvq.kernels.codec.reference import decode, encode, prepared


def encode_block(  # D13: the block's own mean, in INT4
    x: Tensor, fmt: KVFormat, static_scale: Tensor | None = None, *, clip: float = 1.0
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Quantize the rows of a block, [..., block_size, dim], as `encode` does. Returns (codes, scales, means).

    Scales per channel are one row for all of the block: [..., 1, bytes].
    `means`: uint8 [..., bytes of a mean]; None unless the format takes them out.
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
    means = encode(total / torch.full((), float(x.shape[-2]), device=x.device), stored)
    assert means[1] is not None, f"{stored.name} stores scales"
    left = x - decode(*means, stored)[..., None, :]
    codes, scales = encode(left, replace(fmt, rotated=False), clip=clip)
    return codes, scales, torch.cat((means[0], means[1]), dim=-1)


def decode_means(means: Tensor, dim: int) -> Tensor:
    """fp32 [..., dim] of what `encode_block` gave."""
    fmt = mean_format(dim)
    codes, scales = means.split([fmt.code_bytes(dim), fmt.scale_bytes(dim)], dim=-1)
    return decode(codes, scales, fmt)
