"""How likely a text without the mark looks as marked as this one: one-sided, and exact far out.

A normal approximation is off by a factor of hundreds at 1e-12, where verdicts are made.
"""

from math import exp, lgamma, log, log1p

import numpy as np


def binomial_tail(successes: int, trials: int, share: float) -> float:
    """P(X >= successes) for a binomial X, to 1e-9 of itself; the terms are added from the largest on."""
    if successes <= 0:
        return 1.0
    if successes <= trials * share:
        return 1.0 - _upper(trials - successes + 1, trials, 1 - share)  # P(X < s): of failures
    return _upper(successes, trials, share)


def _upper(successes: int, trials: int, share: float) -> float:
    """The tail above the mean, where terms fall."""
    if successes > trials:
        return 0.0
    first = (
        lgamma(trials + 1)
        - lgamma(successes + 1)
        - lgamma(trials - successes + 1)
        + successes * log(share)
        + (trials - successes) * log1p(-share)
    )
    k = np.arange(successes, trials, dtype=np.float64)
    ratios = (trials - k) / (k + 1) * (share / (1 - share))
    return exp(first) * (1 + float(np.cumprod(ratios).sum()))
