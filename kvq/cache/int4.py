"""Four-bit rows in few operations: what counts where a step has few tokens, or many cached ones.

Codes, scales and values are those of `kvq.kernels.codec`, whose way to them is longer.
"""

from functools import lru_cache

import torch
from torch import Tensor

from kvq.kernels.codec import hadamard_block, rotate

_LARGEST_HALF = 65504.0
_SMALLEST_SCALE = 2.0**-24


def encode_int4(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Rotate and quantize a few token rows: codes and scales as the codec's `encode` gives them.

    `x`: fp32 [..., dim], finite. Every stage of the rotation is a product with a matrix of two
    entries a column, +1 or -1: one addition, rounded once, as in the codec's butterflies.
    """
    dim = x.shape[-1]
    block = hadamard_block(dim)
    bound = torch.finfo(torch.float32).max / block
    y = x.clamp(-bound, bound).view(-1, dim)
    for stage in _stages(dim, x.device):
        y = y @ stage
    grouped = y.mul_(block**-0.5).view(*x.shape[:-1], -1, group_size)
    low, high = grouped.aminmax(dim=-1, keepdim=True)
    minimum = low.clamp_(-_LARGEST_HALF, _LARGEST_HALF).half()
    start = minimum.float()
    scale = high.sub_(start).div_(15).half().float().clamp_(_SMALLEST_SCALE, _LARGEST_HALF).half()
    q = grouped.sub_(start).div_(scale.float()).add_(0.5).floor_().clamp_(0, 15)
    parts = q.view(x.shape).to(torch.uint8)
    codes = parts[..., : dim // 2] | (parts[..., dim // 2 :] << 4)
    return codes, torch.cat((scale, minimum), dim=-1).flatten(-2)


def decode_int4(out: Tensor, codes: Tensor, scales: Tensor) -> None:
    """What the codec's `decode` gives, still rotated, into `out`, fp32 [..., dim].

    `codes`: uint8 [..., dim / 2]; `scales`: fp16 [..., 2 * groups].
    """
    half = codes.shape[-1]
    out[..., :half] = codes & 15
    out[..., half:] = codes >> 4
    pairs = scales.float().unflatten(-1, (-1, 2))  # [..., groups, (scale, minimum)]
    out.unflatten(-1, (pairs.shape[-2], -1)).mul_(pairs[..., :1]).add_(pairs[..., 1:])


def unrotate_int4(out: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Decode rows of a power-of-two dimension and undo their rotation, into `out`, fp32 [..., dim].

    With H a Hadamard matrix of +1 and -1 as large as the part P of a group that lies in one half
    of the row, H (s q + m) = s (H q) + (m P, 0, 0, ...). H q is a product of small integers, exact
    and fast; butterflies of the remaining, larger strides and one multiplication belong to it.
    """
    dim, half = out.shape[-1], codes.shape[-1]
    low, high = (codes & 15).view(torch.int8), (codes >> 4).view(torch.int8)
    pairs = scales.float().unflatten(-1, (-1, 2)).mul_(dim**-0.5)  # [..., groups, (scale, minimum)]
    groups = pairs.shape[-2]
    if groups == 1:  # the last butterfly is exact in bytes
        scale, minimum = pairs[..., 0, :1], pairs[..., 0, 1]
        for part, mixed in ((out[..., :half], low + high), (out[..., half:], low - high)):
            torch.mul(_hadamard_of(mixed), scale, out=part)
        out[..., 0].add_(minimum, alpha=dim)
        return
    first = groups // 2
    a = _butterflies(_scaled(low, pairs[..., :first, :])).view(codes.shape)
    b = _butterflies(_scaled(high, pairs[..., first:, :])).view(codes.shape)
    torch.add(a, b, out=out[..., :half])
    torch.sub(a, b, out=out[..., half:])


def has_fast_int8(x: Tensor) -> bool:
    """True where torch multiplies int8 matrices with instructions made for it."""
    return x.device.type == "cpu" and _cpu_has_fast_int8()


def is_power_of_two(dim: int) -> bool:
    """True for 16, 32, 64, ...: the dimensions that `unrotate_int4` takes."""
    return dim >= 16 and dim & (dim - 1) == 0


def unrotated(x: Tensor) -> Tensor:
    """`rotate`, its own inverse, as one matrix product: fp32 [..., dim], other in the last bits."""
    block = hadamard_block(x.shape[-1])
    product: Tensor = (x.float().reshape(-1, block) @ _hadamard(block, x.device)).view(x.shape)
    return product


@lru_cache(maxsize=32)
def _hadamard(block: int, device: torch.device) -> Tensor:
    """The matrix of `rotate` for one block, fp32 [block, block]; symmetric, its own inverse."""
    with torch.inference_mode(False):
        return rotate(torch.eye(block, device=device))


@lru_cache(maxsize=32)
def _stages(dim: int, device: torch.device) -> tuple[Tensor, ...]:
    """The stages h = 1, 2, 4, ... of `rotate` as matrices, fp32 [dim, dim]."""
    at = torch.arange(dim)
    stages, h = [], 1
    with torch.inference_mode(False):
        while h < hadamard_block(dim):
            upper = (at // h) % 2 == 1  # this column is low - high
            stage = torch.zeros(dim, dim)
            stage[at, at] = torch.where(upper, -1.0, 1.0)
            stage[torch.where(upper, at - h, at + h), at] = 1.0
            stages.append(stage.to(device))
            h *= 2
    return tuple(stages)


def _hadamard_of(x: Tensor) -> Tensor:
    """int8 [..., size] times the unscaled Hadamard matrix: int32 of the same shape."""
    size = x.shape[-1]
    product: Tensor = torch._int_mm(x.view(-1, size), _signs(size, x.device)).view(x.shape)
    return product


def _scaled(nibbles: Tensor, pairs: Tensor) -> Tensor:
    """fp32 [..., groups, part]: scale times H q, and the minimum's share of each group."""
    x = _hadamard_of(nibbles.unflatten(-1, (pairs.shape[-2], -1))).float()
    x.mul_(pairs[..., :1])
    x[..., 0].add_(pairs[..., 1], alpha=x.shape[-1])
    return x


def _butterflies(x: Tensor) -> Tensor:
    """Unscaled stages over the second to last dimension, a power of two long."""
    count, h = x.shape[-2], 1
    while h < count:
        low, high = x.unflatten(-2, (-1, 2, h)).unbind(-3)
        x = torch.stack((low + high, low - high), dim=-3).view(x.shape)
        h *= 2
    return x


@lru_cache(maxsize=32)
def _signs(size: int, device: torch.device) -> Tensor:
    """An unscaled Hadamard matrix, int8 [size, size]."""
    with torch.inference_mode(False):
        signs: Tensor = (_hadamard(size, device) * size**0.5).round().to(torch.int8)
    return signs


@lru_cache(maxsize=1)
def _cpu_has_fast_int8() -> bool:
    return torch.backends.mkldnn.is_available() and "AVX512" in torch.backends.cpu.get_cpu_capability()
