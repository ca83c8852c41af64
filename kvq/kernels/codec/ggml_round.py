"""Rounding of rows to GGUF's blocks: the reverse of `dequantize`.

Q4_0 to Q8_0 are rounded as ggml's reference does, bit for bit. For Q4_K, Q5_K and Q6_K, the scales and minima
of groups are searched so that the weighted squared error of every block is small; the same values make the
same bytes. Source: ggml's `ggml-quants.c` for the bytes and the first types; the search is kvq's own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvq.formats.ggml import GgmlType

_PIECE = 1 << 18  # values at a time: a few tensors of them stay in the second cache
_STEPS = [step / 10 for step in range(-10, 11)]  # codes by which a group's range is stretched, in the search
_PARTS = [0.98, 0.95, 0.92, 0.88, 0.84]  # of the range of whole numbers that the largest scale may take
_ROUNDS = 2  # of choosing scales for the block's and the block's for the scales
_TINY = 1e-30
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def round_rows(values: Tensor, kind: GgmlType, weights: Tensor | None = None) -> Tensor:
    """Return rows as blocks: fp32 [rows, in] -> uint8 [rows, row_bytes]; `in` is a multiple of `kind.values`.

    `weights`: of the squared errors in the search for K types, fp32 and like the values or one row [in];
    None: all errors count alike. A scale too large for fp16 becomes infinity.
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
            likely = weights[at : at + step] if weights is not None and weights.ndim == 2 else weights
            likely = torch.ones_like(piece) if likely is None else likely.expand_as(piece)
            grid = _GRIDS[kind.name]
            made = grid.pack(grid.search(_by_group(piece, kind), _by_group(likely, kind)))
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
class _Blocks:
    """Numbers of blocks: value = d * scale * code - d_min * minimum. Scales and minima are whole numbers."""

    d: Tensor  # fp32 [blocks], exact in fp16, like d_min
    d_min: Tensor
    scales: Tensor  # fp32 [groups, blocks], like minima
    minima: Tensor
    codes: Tensor  # fp32 [groups, values, blocks]
    errors: Tensor  # weighted and squared, fp32 [groups, blocks]

    def where(self, is_other: Tensor, other: "_Blocks") -> "_Blocks":
        """Return these numbers, or those of `other` for the groups or blocks that are marked."""
        is_block = is_other if is_other.ndim == 1 else torch.zeros_like(is_other[0])
        return _Blocks(
            d=torch.where(is_block, other.d, self.d),
            d_min=torch.where(is_block, other.d_min, self.d_min),
            scales=torch.where(is_other, other.scales, self.scales),
            minima=torch.where(is_other, other.minima, self.minima),
            codes=torch.where(is_other.expand_as(self.scales)[:, None], other.codes, self.codes),
            errors=torch.where(is_other, other.errors, self.errors),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Grid:
    """Codes, scales and minima that a K type can store."""

    codes: tuple[int, int]  # least and most
    scales: tuple[int, int]
    has_minimum: bool
    pack: Callable[[_Blocks], Tensor]

    def search(self, x: Tensor, w: Tensor) -> _Blocks:
        """Return numbers for values x of weights w, both fp32 [groups, values, blocks]."""
        scale, low = self._ranges(x, w)
        furthest = scale.gather(0, scale.abs().argmax(0, keepdim=True))[0]  # with its sign
        limit = self.scales[1] if self.has_minimum else self.scales[0]
        best = self._rounded(x, w, furthest / limit, low.amin(0) / -63, scale, low)
        for part in _PARTS:  # a block's numbers decide how well those of small groups are met
            tried = self._rounded(x, w, furthest / limit / part, low.amin(0) / -63 / part, scale, low)
            best = best.where(tried.errors.sum(0) < best.errors.sum(0), tried)
        for _ in range(_ROUNDS):
            start = best
            for step in (-1, 0, 1):
                tried = self._coded(x, w, start.d, start.d_min, start.scales + step, start.minima)
                best = best.where(tried.errors < best.errors, tried)
                if self.has_minimum:
                    over = (w * (tried.d * tried.scales)[:, None].mul(tried.codes).sub_(x)).sum(1) / w.sum(1)
                    fitting = (over * _inverse(tried.d_min)).round()
                    for lower in (-1, 0, 1):
                        tried = self._coded(x, w, start.d, start.d_min, tried.scales, fitting + lower)
                        best = best.where(tried.errors < best.errors, tried)
            tried = self._coded(x, w, *self._refitted(x, w, best), best.scales, best.minima)
            best = best.where(tried.errors.sum(0) < best.errors.sum(0), tried)
        return best

    def _ranges(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scale and minimum (not above 0) of each group that fit best, fp32 [groups, blocks]."""
        least, most = self.codes
        if self.has_minimum:
            low = x.amin(1).clamp_max(0)
            reach, ends = x.amax(1) - low, most
        else:
            low = torch.zeros_like(x[:, 0])
            reach, ends = x.gather(1, x.abs().argmax(1, keepdim=True))[:, 0], least
        sum_w, sum_x = w.sum(1), (w * x).sum(1)
        best_error = torch.full_like(low, torch.inf)
        best_scale, best_low = torch.zeros_like(low), low
        for step in _STEPS:
            inverse = (ends + step) * _inverse(reach)
            codes = ((x - low[:, None]) * inverse[:, None]).round().clamp_(least, most)
            weighted = w * codes
            sum_c, sum_cc, sum_xc = weighted.sum(1), (weighted * codes).sum(1), (weighted * x).sum(1)
            scale, offset = sum_xc / sum_cc.clamp_min(_TINY), torch.zeros_like(low)
            if self.has_minimum:
                det = sum_w * sum_cc - sum_c * sum_c
                free_low = (sum_cc * sum_x - sum_c * sum_xc) / det
                is_free = (det > 0) & (free_low < 0)
                offset = torch.where(is_free, free_low, 0.0)
                scale = torch.where(is_free, (sum_w * sum_xc - sum_x * sum_c) / det, scale)
            error = (w * (codes * scale[:, None] + offset[:, None] - x).square_()).sum(1)
            is_better = error < best_error
            best_error = torch.where(is_better, error, best_error)
            best_scale = torch.where(is_better, scale, best_scale)
            best_low = torch.where(is_better, offset, best_low)
        return best_scale, best_low

    def _rounded(self, x: Tensor, w: Tensor, d: Tensor, d_min: Tensor, scale: Tensor, low: Tensor) -> _Blocks:
        """Round scales and minima of groups to whole numbers, times the block's."""
        d, d_min = d.half().float(), d_min.half().float()
        return self._coded(x, w, d, d_min, (scale * _inverse(d)).round(), (-low * _inverse(d_min)).round())

    def _coded(
        self, x: Tensor, w: Tensor, d: Tensor, d_min: Tensor, scales: Tensor, minima: Tensor
    ) -> _Blocks:
        scales, minima = scales.clamp(*self.scales), minima.clamp(0, 63)
        scale, low = (d * scales)[:, None], (d_min * minima)[:, None]
        codes = ((x + low) * _inverse(scale)).round_().clamp_(*self.codes)
        errors = (w * (scale * codes - low - x).square_()).sum(1)
        return _Blocks(d=d, d_min=d_min, scales=scales, minima=minima, codes=codes, errors=errors)

    def _refitted(self, x: Tensor, w: Tensor, given: _Blocks) -> tuple[Tensor, Tensor]:
        """Return d and d_min that fit best to the other numbers, by least squares."""
        a, b = given.scales[:, None] * given.codes, -given.minima[:, None].expand_as(x)
        aa, ax = (w * a * a).sum((0, 1)), (w * a * x).sum((0, 1))
        d, d_min = ax / aa.clamp_min(_TINY), given.d_min
        if self.has_minimum:
            ab, bb, bx = ((w * b * other).sum((0, 1)) for other in (a, b, x))
            det = aa * bb - ab * ab
            is_sound = det > 1e-6 * aa * bb
            d = torch.where(is_sound, (bb * ax - ab * bx) / det, d)
            d_min = torch.where(is_sound, (aa * bx - ab * ax) / det, d_min).clamp_min(0)
        return d.half().float(), d_min.half().float()


def _bytes(x: Tensor) -> Tensor:
    """Whole numbers of fp32 [..., blocks] -> uint8 [blocks, ...]."""
    return x.movedim(-1, 0).to(torch.int16).to(torch.uint8)


def _pack_q4_k(found: _Blocks) -> Tensor:
    codes, scales, minima = _bytes(found.codes), _bytes(found.scales), _bytes(found.minima)
    highest = [part[:, :4] | part[:, 4:] >> 4 << 6 for part in (scales, minima)]
    packed = [_half(found.d), _half(found.d_min), *highest, scales[:, 4:] & 15 | minima[:, 4:] << 4]
    return torch.cat([*packed, _planes(codes.view(-1, 4, 2, 32) & 15, 4).flatten(1)], 1)


def _pack_q5_k(found: _Blocks) -> Tensor:
    packed = _pack_q4_k(found)  # without the highest bits
    return torch.cat([packed[:, :16], _planes(_bytes(found.codes) >> 4, 1), packed[:, 16:]], 1)


def _pack_q6_k(found: _Blocks) -> Tensor:
    codes = _bytes(found.codes + 32).view(-1, 2, 4, 32)  # by halves of the block
    low = _planes((codes & 15).view(-1, 2, 2, 64), 4).flatten(1)
    scales = found.scales.T.to(torch.int8).view(torch.uint8)
    return torch.cat([low, _planes(codes >> 4, 2).flatten(1), scales, _half(found.d)], 1)


_GRIDS = {
    "Q4_K": _Grid(codes=(0, 15), scales=(0, 63), has_minimum=True, pack=_pack_q4_k),
    "Q5_K": _Grid(codes=(0, 31), scales=(0, 63), has_minimum=True, pack=_pack_q5_k),
    "Q6_K": _Grid(codes=(-32, 31), scales=(-128, 127), has_minimum=False, pack=_pack_q6_k),
}
ROUNDED = ("F32", "F16", "BF16", *_SIMPLE, *_GRIDS)  # types that `round_rows` makes
