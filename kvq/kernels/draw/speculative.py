"""Drafted tokens: kept as often as the target would have drawn them, else replaced.

A token x that was drawn from the draft's distribution q is kept with probability min(1, p(x) / q(x)), p being
the target's; one that is not makes way for a token drawn from max(0, p - q), normalized. What comes out is
distributed as p, whatever q is. Sources: Leviathan, Kalman and Matias 2023, "Fast Inference from Transformers
via Speculative Decoding", section 2.3; Chen et al. 2023, "Accelerating Large Language Model Decoding with
Speculative Sampling", theorem 1.

A draft without a distribution, say one found in the text so far, has probability 1: it is kept with p(x), and
what replaces it is drawn from p without x. That is a draw from p which is compared with x, and needs no rule.
"""

import torch
from torch import Tensor


def draw_sums(sums: Tensor, uniform: Tensor) -> Tensor:
    """Return the first column of each row whose running sum passes u * total: fp64 [rows, width], [rows]."""
    totals = sums[:, -1]
    marks = torch.minimum(uniform * totals, torch.nextafter(totals, torch.zeros_like(totals)))
    return torch.searchsorted(sums, marks[:, None], right=True)[:, 0].clamp_(max=sums.shape[-1] - 1)


def keep_or_replace(  # D255: one comparison keeps drafts
    target: Tensor, draft: Tensor, tokens: Tensor, keeping: Tensor, uniform: Tensor
) -> Tensor:
    """Return each row's token, int64 [rows]: the drafted one, or the one that replaces it, never the same.

    `target`, `draft`: what p and q are proportional to, int64 [rows, vocab]; `tokens`: drawn from the draft,
    int64 [rows]; `keeping`, `uniform`: random numbers in [0, 1), fp64 [rows], one to decide and one to draw.
    """
    p, q = _normalized(target), _normalized(draft)
    columns = tokens[:, None]
    is_kept = keeping * q.gather(1, columns)[:, 0] < p.gather(1, columns)[:, 0]
    rest = (p - q).clamp_(min=0)
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, p)  # p is q: every draft is kept
    return torch.where(is_kept, tokens, draw_sums(rest.cumsum(dim=-1), uniform))


def _normalized(masses: Tensor) -> Tensor:
    return masses.double() / masses.sum(dim=-1, keepdim=True).double()
