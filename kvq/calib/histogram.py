"""Magnitudes of elements, counted in logarithmic bins: one pass, no range known beforehand."""

import torch
from torch import Tensor

_PER_OCTAVE = 32  # a bin is 2.2% wide
_LOWEST, _HIGHEST = -40, 40  # powers of two that bins reach; smaller elements count as zero
_BINS = (_HIGHEST - _LOWEST) * _PER_OCTAVE + 1  # the first holds what is smaller


class Magnitudes:
    """Absolute values of elements per head: maximum, percentiles, and the best clip of symmetric codes."""

    def __init__(self, heads: int) -> None:
        self.absmax = torch.zeros(heads)  # [heads]
        self._counts = torch.zeros(heads, _BINS, dtype=torch.int64)

    def update(self, rows: Tensor) -> None:
        """Take in rows [tokens, heads, dim]."""
        size = rows.abs().float()
        self.absmax = torch.maximum(self.absmax, size.amax(dim=(0, 2)).cpu())
        heads = size.shape[1]
        bins = (size.log2() * _PER_OCTAVE).floor() - (_LOWEST * _PER_OCTAVE - 1)
        bins = bins.nan_to_num(0.0).clamp(0, _BINS - 1).long()  # [tokens, heads, dim]
        flat = (bins + torch.arange(heads, device=bins.device)[:, None] * _BINS).flatten()
        self._counts += torch.bincount(flat, minlength=heads * _BINS).view(heads, _BINS).cpu()

    def percentile(self, share: float) -> list[float]:
        """The magnitude that `share` (0 to 1) of each head's elements do not exceed, to a bin's width."""
        reached = self._counts.cumsum(1).double() / self._counts.sum(1, keepdim=True)
        index = (reached < share).sum(1).clamp(max=_BINS - 1)
        return torch.minimum(_edges()[index + 1].float(), self.absmax).tolist()

    def least_squares_clip(self, levels: int) -> list[float]:
        """Per head, the largest magnitude that symmetric codes of +-`levels` should reach.

        It minimizes the squared error: (c / levels)^2 / 12 of each element within c, (|x| - c)^2 of
        each beyond. Source: Choi et al. 2018, PACT, for why; found here by trying every bin's edge.
        """
        middle = (_edges()[:-1] + _edges()[1:]) / 2  # [bins]
        counts = self._counts.double()
        clips = _edges()[1:]
        inside = counts.cumsum(1)  # [heads, bins], elements of at most the bin's upper edge
        beyond = counts.sum(1, keepdim=True) - inside
        first = (counts * middle).flip(1).cumsum(1).flip(1) - counts * middle
        second = (counts * middle**2).flip(1).cumsum(1).flip(1) - counts * middle**2
        saturated = second - 2 * clips * first + clips**2 * beyond
        error = inside * (clips / levels) ** 2 / 12 + saturated
        best = clips[error.argmin(1)]
        return torch.minimum(best.float(), self.absmax).tolist()


def _edges() -> Tensor:
    """Lower edges of the bins and the last one's upper edge, fp64 [bins + 1]."""
    exponents = torch.arange(_BINS, dtype=torch.float64) / _PER_OCTAVE + _LOWEST
    return torch.cat((torch.zeros(1, dtype=torch.float64), 2.0**exponents))
