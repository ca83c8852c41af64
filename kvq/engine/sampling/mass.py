"""Probabilities as whole numbers, so that sums don't depend on the order they are taken in.

A softmax in floating point adds its terms in an order that changes with the batch, the alignment of a
row and the device's threads, and so do its last bits. A token's mass is

    mass = floor(2**43 * exp((logit - highest logit) / temperature))

and whole numbers add up to the same total in any order. The exponential is fp32: its error of 1e-7 is
far below that of the logits, and fp64 is slow on many GPUs. Tokens less than 2**-43 as likely as the
likeliest have no mass and are never drawn. Fewer than 2**20 tokens can't overflow int64.
"""

import math

import torch
from torch import Tensor

MASS_OF_LIKELIEST = 1 << 43
MAX_VOCAB = (1 << 20) - 1


def masses(logits: Tensor, peaks: Tensor, temperature: Tensor | None = None) -> Tensor:
    """Return the tokens' masses, int64, in the shape of `logits`: fp32, [rows, width].

    `peaks`: the row's highest logit, [rows]; `temperature`: above 0, [rows], 1 where None.
    """
    scores = logits - peaks[:, None]  # before the division, which then can't overflow upwards
    if temperature is not None:
        scores.div_(temperature[:, None])
    return scores.exp_().mul_(MASS_OF_LIKELIEST).to(torch.int64)


def draw(sums: Tensor, totals: Tensor, uniform: Tensor) -> Tensor:
    """Return the column that each row draws, [rows] int64: the first whose running sum passes u * total.

    `sums`: running sums of masses, [rows, width]; `totals`: int64, [rows], a running sum of each row,
    behind which nothing is drawn; `uniform`: u in [0, 1), fp64, [rows].
    """
    marks = (uniform * totals.double()).to(torch.int64)
    marks = torch.minimum(marks, totals - 1)  # a product near the total may round up to it
    columns = torch.searchsorted(sums, marks[:, None], right=True)[:, 0]
    return columns.clamp_(max=sums.shape[-1] - 1)  # a row of NaN may find none


def log_probability(logit: float, peak: float, total: float) -> float:
    """Return the natural log-probability of a token in a row of masses that add up to `total`.

    NaN where the row's highest logit isn't finite.
    """
    if not math.isfinite(peak):
        return math.nan
    return logit - peak - math.log(total / MASS_OF_LIKELIEST)
