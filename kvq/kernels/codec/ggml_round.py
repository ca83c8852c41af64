"""Rounding of rows to GGUF's blocks: the reverse of `dequantize`.

Q4_0 to Q8_0 are rounded as ggml's reference does, bit for bit. For Q4_K, Q5_K and Q6_K, the scales and minima
of groups are searched so that the squared error of every block is small; the same values make the
same bytes. Source: ggml's `ggml-quants.c` for the bytes and the first types; the search is kvq's own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from kvq.formats.ggml import GgmlType

_PIECE = 1 << 18  # values at a time: a few tensors of them stay in the second cache
_STEPS = [step / 10 for step in range(-10, 11)]  # codes by which a group's range is stretched, in the search
_PARTS = [1.0, 0.98, 0.95, 0.92, 0.88, 0.84]  # of the range of whole numbers that the largest scale may take
_ROUNDS = 2  # of choosing scales for the block's and the block's for the scales
_TINY = 1e-30
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def round_rows(values: Tensor, kind: GgmlType) -> Tensor:
    """Return rows as blocks: fp32 [rows, in] -> uint8 [rows, row_bytes]; `in` is a multiple of `kind.values`.

    A scale too large for fp16 becomes infinity.
    """
    if kind.is_float:
        return values.to(_FLOATS[kind.name]).contiguous().view(torch.uint8)
    rows, count = values.shape
    blocks = torch.empty(rows, count // kind.values * kind.nbytes, dtype=torch.uint8, device=values.device)
    step = max(1, _PIECE // count)
    for at in range(0, rows, step):
        piece = values[at : at + step].float()
        if kind.name in _SIMPLE:
            made = _SIMPLE[kind.name](piece.reshape(-1, kind.values))
        else:
            least = 0 if kind.has_minimum else -1 << kind.bits - 1
            span = least, least + (1 << kind.bits) - 1
            made = _Search(x=_by_group(piece, kind), kind=kind, codes_range=span).blocks()
        blocks[at : at + step] = made.view(len(piece), -1)
    return blocks


def _half(scale: Tensor) -> Tensor:
    """fp32 [blocks] -> the bytes of fp16, [blocks, 2]."""
    return scale.half()[:, None].view(torch.uint8)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


def _nibbles(codes: Tensor) -> Tensor:
    """uint8 [..., 2 n] -> [..., n]: the first half in the low nibbles."""
    low, high = codes.chunk(2, -1)
    return low & 15 | high << 4


def _high_bits(codes: Tensor) -> Tensor:
    """Bit 4 of uint8 [blocks, 32], from the lowest of the first byte on: [blocks, 4]."""
    return _planes((codes >> 4 & 1).view(-1, 4, 8).mT, 1)


def _planes(codes: Tensor, bits: int) -> Tensor:
    """uint8 [..., k, n] -> [..., n]: the bits of the first k in the lowest place."""
    shifts = torch.arange(codes.shape[-2], dtype=torch.uint8, device=codes.device)[:, None] * bits
    return (codes << shifts).sum(-2, dtype=torch.uint8)


def _from_peak(x: Tensor, bits: int) -> Tensor:
    """Q4_0, Q5_0: the value furthest from 0 gets the lowest code."""
    middle = 1 << bits - 1
    scale = x.gather(1, x.abs().argmax(1, keepdim=True)) / -middle
    codes = (x * _inverse(scale) + (middle + 0.5)).trunc().clamp(0, 2 * middle - 1).to(torch.uint8)
    return torch.cat([_half(scale[:, 0]), *([_high_bits(codes)] if bits == 5 else []), _nibbles(codes)], 1)


def _from_minimum(x: Tensor, bits: int) -> Tensor:
    """Q4_1, Q5_1: the codes span the block's range."""
    most = (1 << bits) - 1
    low = x.amin(1, keepdim=True)
    scale = (x.amax(1, keepdim=True) - low) / most
    codes = ((x - low) * _inverse(scale) + 0.5).trunc().clamp(0, most).to(torch.uint8)
    head = [_half(scale[:, 0]), _half(low[:, 0])]
    return torch.cat([*head, *([_high_bits(codes)] if bits == 5 else []), _nibbles(codes)], 1)


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


def _by_group(x: Tensor, kind: GgmlType) -> Tensor:
    """[rows, in] -> contiguous [groups, values of a group, blocks], which sums over values take fast."""
    return x.reshape(-1, kind.values // kind.group, kind.group).permute(1, 2, 0).contiguous()


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
        scale, low = self._ranges()
        furthest = scale.gather(0, scale.abs().argmax(0, keepdim=True))[0]  # with its sign
        first = []
        for part in _PARTS:
            d = (furthest / (part * (63 if self.kind.has_minimum else -128))).half().float()
            d_min = (low.amin(0) / (part * -63)).half().float()
            first.append(
                self._tried(d, d_min, (scale * _inverse(d)).round(), (-low * _inverse(d_min)).round())
            )
        best = reduce(_better_blocks, first)
        for _ in range(_ROUNDS):
            best = self._moved(best)
            best = _better_blocks(best, self._tried(*self._refitted(best), best[2], best[3]))
        d, d_min, scales, minima, _ = best
        codes = self._codes(*best[:4]).movedim(2, 0)
        return _PACKED[self.kind.name](d[0], d_min[0], scales.T, minima.T, codes)

    def _moved(self, best: Tensor) -> Tensor:
        """Try neighbouring scales, with the minima that suit them."""
        d, d_min, scales, minima, _ = best
        for step in (-1, 0, 1):
            tried = self._tried(d, d_min, scales + step, minima)
            best = torch.where(tried[4] < best[4], tried, best)
            if not self.kind.has_minimum:
                continue
            product = (d * tried[2])[:, None] * self._codes(*tried[:4])
            fitting = (product.sub_(self.x).mean(1) * _inverse(d_min)).round()
            for lower in (-1, 0, 1):
                tried = self._tried(d, d_min, scales + step, fitting + lower)
                best = torch.where(tried[4] < best[4], tried, best)
        return best

    def _codes(self, d: Tensor, d_min: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
        """Return the nearest codes, fp32 like x."""
        shifted = self.x + (d_min * minima)[:, None] if self.kind.has_minimum else self.x
        return (shifted * _inverse(d * scales)[:, None]).round_().clamp_(*self.codes_range)

    def _tried(self, d: Tensor, d_min: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
        scales = scales.clamp(*((0, 63) if self.kind.has_minimum else (-128, 127)))
        minima = minima.clamp(0, 63)
        found = self._codes(d, d_min, scales, minima).mul_((d * scales)[:, None]).sub_(self.x)
        errors = found.sub_((d_min * minima)[:, None]).square_().sum(1)
        return torch.stack([d.expand_as(scales), d_min.expand_as(scales), scales, minima, errors])

    def _ranges(self) -> tuple[Tensor, Tensor]:
        """Return the scale and minimum (not above 0) of each group that fit best, fp32 [groups, blocks]."""
        x, is_affine, (least, most) = self.x, self.kind.has_minimum, self.codes_range
        low = x.amin(1).clamp_max(0) if is_affine else torch.zeros_like(x[:, 0])
        peak = x.gather(1, x.abs().argmax(1, keepdim=True))[:, 0]
        reach, end = (x.amax(1) - low, most) if is_affine else (peak, least)
        sum_w, sum_x = x.shape[1], x.sum(1)
        best = torch.stack([torch.zeros_like(low), low, torch.full_like(low, torch.inf)])
        for step in _STEPS:
            inverse = (end + step) * _inverse(reach)
            codes = ((x - low[:, None]) * inverse[:, None]).round_().clamp_(least, most)
            sum_c, sum_cc, sum_xc = codes.sum(1), (codes * codes).sum(1), (codes * x).sum(1)
            scale, offset = sum_xc / sum_cc.clamp_min(_TINY), torch.zeros_like(low)
            if is_affine:  # both by least squares, if that minimum is possible
                det = sum_w * sum_cc - sum_c * sum_c
                free = (sum_cc * sum_x - sum_c * sum_xc) / det
                is_free = (det > 0) & (free < 0)
                offset = torch.where(is_free, free, 0.0)
                scale = torch.where(is_free, (sum_w * sum_xc - sum_x * sum_c) / det, scale)
            errors = codes.mul_(scale[:, None]).add_(offset[:, None]).sub_(x).square_().sum(1)
            best = torch.where(errors < best[2], torch.stack([scale, offset, errors]), best)
        return best[0], best[1]

    def _refitted(self, given: Tensor) -> tuple[Tensor, Tensor]:
        """Return d and d_min that fit best to the other numbers, by least squares, fp32 [blocks]."""
        a, b = given[2][:, None] * self._codes(*given[:4]), given[3][:, None].expand_as(self.x)
        aa, ab, bb, ax, bx = (
            (p * q).sum((0, 1)) for p, q in ((a, a), (a, b), (b, b), (a, self.x), (b, self.x))
        )
        det = aa * bb - ab * ab
        is_both = det > 1e-6 * aa * bb
        d = torch.where(is_both, (bb * ax - ab * bx) / det, ax / aa.clamp_min(_TINY))
        d_min = torch.where(is_both, (ab * ax - aa * bx) / det, given[1][0]).clamp_min(0)
        return d.half().float(), d_min.half().float()


def _better_blocks(one: Tensor, other: Tensor) -> Tensor:
    return torch.where(other[4].sum(0) < one[4].sum(0), other, one)


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
