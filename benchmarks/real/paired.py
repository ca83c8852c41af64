"""Two formats on the same problems: how far apart their shares of successes are, and how sure that is."""

from dataclasses import dataclass
from math import comb, sqrt

from kvq.evals.report.bootstrap import Z95, Interval

_ADDED = 0.5  # to each kind of pair


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Difference of the success rates of this format and the baseline."""

    difference: float
    interval: Interval  # 95%
    gained: int  # problems that this format alone solved
    lost: int  # problems that the baseline alone solved
    p: float  # of at least such an imbalance if both were alike; two-sided


def difference(outcomes: str, baseline: str) -> Difference:
    """Compare outcomes, a 1 or a 0 for each problem, in the same order.

    The interval is Wald's with half a pair added to each kind, which has a width where no outcome differs;
    p is McNemar's, exact.

    Source: Agresti and Min, "Simple improved confidence intervals for comparing matched proportions" (2005);
    McNemar, "Note on the sampling error of the difference between correlated proportions" (1947).
    """
    pairs = list(zip(outcomes, baseline, strict=True))
    gained, lost, count = pairs.count(("1", "0")), pairs.count(("0", "1")), len(pairs)
    more, less, total = gained + _ADDED, lost + _ADDED, count + 4 * _ADDED
    middle = (more - less) / total
    half = Z95 * sqrt(more + less - (more - less) ** 2 / total) / total
    return Difference(
        difference=(gained - lost) / count,
        interval=(max(-1.0, middle - half), min(1.0, middle + half)),
        gained=gained,
        lost=lost,
        p=_exact(gained, lost),
    )


def _exact(gained: int, lost: int) -> float:
    """Two-sided probability of a binomial with p = 1/2."""
    discordant, fewer = gained + lost, min(gained, lost)
    return min(1.0, 2.0 * sum(comb(discordant, k) for k in range(fewer + 1)) / float(2**discordant))
