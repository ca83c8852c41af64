"""Rounding of rows to GGUF's blocks: the reverse of `dequantize`.

Q4_0 to Q8_0 are rounded as ggml's reference does, bit for bit. For Q4_K, Q5_K and Q6_K, the scales and minima
of groups are searched so that the squared error of every block is small; the same values make the
same bytes. Source: ggml's `ggml-quants.c` for the bytes and the first types; the search is kvq's own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvq.formats.ggml import GgmlType
from kvq.kernels.codec.ggml import FLOATS

_STEPS = [step / 10 for step in range(-10, 11)]  # codes by which a group's range is stretched, in the search
_ROUNDS = 5  # of choosing scales for the block's and the block's for the scales
_TINY = 1e-30


def round_rows(values: Tensor, kind: GgmlType) -> Tensor:
    """Return rows as blocks: fp32 [rows, in] -> uint8 [rows, row_bytes]; `in` is a multiple of `kind.values`.

    A scale too large for fp16 becomes infinity.
    """
    if kind.is_float:
        return values.to(FLOATS[kind.name]).contiguous().view(torch.uint8)
    if kind.name in _SIMPLE:
        blocks = _SIMPLE[kind.name](values.reshape(-1, kind.values))
    else:
        groups = values.reshape(-1, kind.values // kind.group, kind.group)
        least = 0 if kind.has_minimum else -1 << kind.bits - 1
        span = least, least + (1 << kind.bits) - 1
        blocks = _Search(x=groups.permute(1, 2, 0).contiguous(), kind=kind, codes_range=span).blocks()
    return blocks.view(len(values), -1)


def _half(scale: Tensor) -> Tensor:
    """fp32 [blocks] -> the bytes of fp16, [blocks, 2]."""
    return scale.half()[:, None].view(torch.uint8)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


def _planes(codes: Tensor, bits: int) -> Tensor:
    """uint8 [..., k, n] -> [..., n]: the bits of the first k in the lowest place."""
    shifts = torch.arange(codes.shape[-2], dtype=torch.uint8, device=codes.device)[:, None] * bits
    return (codes << shifts).sum(-2, dtype=torch.uint8)


def _simple(head: list[Tensor], codes: Tensor, bits: int) -> Tensor:
    """Return fp16 numbers [blocks, 1], bit 4 of codes [blocks, 32] if they have one, and low nibbles."""
    codes = codes.to(torch.uint8)
    high = [_planes((codes >> 4).view(-1, 4, 8).mT, 1)] if bits == 5 else []
    return torch.cat([_half(x[:, 0]) for x in head] + high + [_planes(codes.view(-1, 2, 16) & 15, 4)], 1)


def _from_peak(x: Tensor, bits: int) -> Tensor:
    """Q4_0, Q5_0: the value furthest from 0 gets the lowest code."""
    middle = 1 << bits - 1
    scale = x.gather(1, x.abs().argmax(1, keepdim=True)) / -middle
    codes = (x * _inverse(scale) + (middle + 0.5)).trunc().clamp(0, 2 * middle - 1)
    return _simple([scale], codes, bits)


def _from_minimum(x: Tensor, bits: int) -> Tensor:
    """Q4_1, Q5_1: the codes span the block's range."""
    most = (1 << bits) - 1
    low = x.amin(1, keepdim=True)
    scale = (x.amax(1, keepdim=True) - low) / most
    codes = ((x - low) * _inverse(scale) + 0.5).trunc().clamp(0, most)
    return _simple([scale, low], codes, bits)


def _q8_0(x: Tensor) -> Tensor:
    scale = x.abs().amax(1, keepdim=True) / 127
    scaled = x * _inverse(scale)
    whole = scaled.abs().floor()
    codes = (whole + (2 * (scaled.abs() - whole)).floor()) * scaled.sign()  # halves away from 0
    return torch.cat([_half(scale[:, 0]), codes.to(torch.int8).view(torch.uint8)], 1)


_SIMPLE: dict[str, Callable[[Tensor], Tensor]] = {  # fp32 [blocks, 32] -> uint8 [blocks, nbytes]
    "Q4_0": lambda x: _from_peak(x, 4), "Q5_0": lambda x: _from_peak(x, 5), "Q8_0": _q8_0,
    "Q4_1": lambda x: _from_minimum(x, 4), "Q5_1": lambda x: _from_minimum(x, 5),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class _Search:  # D386: plain squared errors
    """Search for the numbers of blocks: value = d * scale * code - d_min * minimum.

    Groups have scales and minima, which are whole numbers. What is tried is one tensor: d, d_min, scale,
    minimum and squared error, fp32 [5, groups, blocks].
    """

    x: Tensor  # fp32 [groups, values, blocks]
    kind: GgmlType
    codes_range: tuple[int, int]

    def blocks(self) -> Tensor:
        """Return uint8 [blocks, nbytes]."""
        low, scale = self._ranges()
        furthest = scale.gather(0, scale.abs().argmax(0, keepdim=True))[0]  # with its sign
        d = (furthest / (63 if self.kind.has_minimum else -128)).half().float()
        d_min = (low.amin(0) / -63).half().float()
        best = self._tried(d, d_min, (scale * _inverse(d)).round(), (-low * _inverse(d_min)).round())
        for _ in range(_ROUNDS):
            best = self._moved(best)
            refitted = self._tried(*self._refitted(best), best[2], best[3])
            best = torch.where(refitted[4].sum(0) < best[4].sum(0), refitted, best)
        d, d_min, scales, minima, _ = best
        codes = self._codes(*best[:4]).movedim(2, 0)
        return _PACKED[self.kind.name](d[0], d_min[0], scales.T, minima.T, codes)

    def _moved(self, best: Tensor) -> Tensor:
        """Try neighbouring scales, with the minima that suit them."""
        d, d_min, scales, minima, _ = best
        for step in (-1, 0, 1):
            tried = self._tried(d, d_min, scales + step, minima)
            product = (d * tried[2])[:, None] * self._codes(*tried[:4])
            fitting = ((product - self.x).mean(1) * _inverse(d_min)).round()
            for lower in (-1, 0, 1) if self.kind.has_minimum else (0,):
                tried = self._tried(d, d_min, scales + step, fitting + lower)
                best = torch.where(tried[4] < best[4], tried, best)
        return best

    def _codes(self, d: Tensor, d_min: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
        """Return the nearest codes, fp32 like x."""
        shifted = self.x + (d_min * minima)[:, None]
        return (shifted * _inverse(d * scales)[:, None]).round_().clamp_(*self.codes_range)

    def _tried(self, d: Tensor, d_min: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
        scales = scales.clamp(*((0, 63) if self.kind.has_minimum else (-128, 127)))
        minima = minima.clamp(0, 63)
        found = self._codes(d, d_min, scales, minima).mul_((d * scales)[:, None]).sub_(self.x)
        errors = found.sub_((d_min * minima)[:, None]).square_().sum(1)
        return torch.stack([d.expand_as(scales), d_min.expand_as(scales), scales, minima, errors])

    def _ranges(self) -> tuple[Tensor, Tensor]:
        """Return each group's minimum, not above 0, and the scale that fits best, fp32 [groups, blocks]."""
        is_affine, (least, most) = self.kind.has_minimum, self.codes_range
        low = self.x.amin(1).clamp_max(0) if is_affine else torch.zeros_like(self.x[:, 0])
        above = self.x - low[:, None]
        reach = above.gather(1, above.abs().argmax(1, keepdim=True))[:, 0]
        best = torch.stack([torch.zeros_like(low), torch.full_like(low, torch.inf)])
        for step in _STEPS:
            inverse = ((most if is_affine else least) + step) * _inverse(reach)
            codes = (above * inverse[:, None]).round_().clamp_(least, most)
            scale = (codes * above).sum(1) / (codes * codes).sum(1).clamp_min(_TINY)
            errors = codes.mul_(scale[:, None]).sub_(above).square_().sum(1)
            best = torch.where(errors < best[1], torch.stack([scale, errors]), best)
        return low, best[0]

    def _refitted(self, given: Tensor) -> tuple[Tensor, Tensor]:
        """Return the d that fits best to the other numbers, and the d_min that fits to it, fp32 [blocks]."""
        a, b = given[2][:, None] * self._codes(*given[:4]), given[3][:, None].expand_as(self.x)
        d = (a * (self.x + given[1][0] * b)).sum((0, 1)) / (a * a).sum((0, 1)).clamp_min(_TINY)
        d_min = (b * (d * a - self.x)).sum((0, 1)) / (b * b).sum((0, 1)).clamp_min(_TINY)
        return d.half().float(), d_min.half().float()


def _bytes(x: Tensor) -> Tensor:
    return x.to(torch.int16).to(torch.uint8)


def _q4_k(d: Tensor, d_min: Tensor, scales: Tensor, minima: Tensor, codes: Tensor) -> Tensor:
    """d, d_min fp32 [blocks]; scales, minima [blocks, groups]; codes [blocks, groups, values]."""
    s, m = _bytes(scales), _bytes(minima)
    highest = [part[:, :4] | part[:, 4:] >> 4 << 6 for part in (s, m)]
    packed = [_half(d), _half(d_min), *highest, s[:, 4:] & 15 | m[:, 4:] << 4]
    return torch.cat([*packed, _planes(_bytes(codes).view(-1, 4, 2, 32) & 15, 4).flatten(1)], 1)


def _q5_k(d: Tensor, d_min: Tensor, scales: Tensor, minima: Tensor, codes: Tensor) -> Tensor:
    packed = _q4_k(d, d_min, scales, minima, codes)  # without the highest bits
    return torch.cat([packed[:, :16], _planes(_bytes(codes) >> 4, 1), packed[:, 16:]], 1)


def _q6_k(d: Tensor, d_min: Tensor, scales: Tensor, minima: Tensor, codes: Tensor) -> Tensor:
    codes = _bytes(codes + 32).view(-1, 2, 4, 32)  # by halves of the block
    low = _planes((codes & 15).view(-1, 2, 2, 64), 4).flatten(1)
    return torch.cat([low, _planes(codes >> 4, 2).flatten(1), _bytes(scales), _half(d)], 1)


_PACKED: dict[str, Callable[..., Tensor]] = {"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
