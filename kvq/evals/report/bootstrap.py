"""Confidence intervals for means over documents, computed by resampling entire documents.

Tokens of one document are not independent, so entire documents are sampled. All formats and the baseline are
resampled together: a document's contribution to both cancels out, so differences far smaller than the spread
between documents can be detected.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from kvq.errors import ConfigError

CONFIDENCE = 0.95
Z95 = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)  # number of standard deviations on each side
FEWEST_DOCUMENTS = 8  # with fewer, an interval would mean little and is left out
FEWEST_RESAMPLES = 100
_DRAWN = 1 << 22  # numbers per draw
_KEPT = 4  # draws that are cached

Interval = tuple[float, float]
Floats = npt.NDArray[np.float64]
Statistic = Callable[..., Floats]  # means [resamples] of every column -> statistic [resamples]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bootstrap:  # D36: paired documents; formats share one set of resamples
    """Bootstrap options: the number of resamples, and their seed."""

    resamples: int = 2000
    seed: int = 0
    _drawn: dict[tuple[int, int], npt.NDArray[np.float32]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )  # (documents, first resample) -> weights; shared by all formats

    def __post_init__(self) -> None:
        if self.resamples < FEWEST_RESAMPLES:
            raise ConfigError(f"intervals need at least {FEWEST_RESAMPLES} resamples, got {self.resamples}")

    def interval(self, statistic: Statistic, *columns: npt.ArrayLike) -> Interval | None:
        """Return a two-sided 95% interval for a statistic of document means; None if documents are too few.

        `columns`: arrays [documents] with one number per document, such as its mean loss; all documents have
        the same weight. `statistic` receives the means of the columns, which are resampled jointly.

        The bounds are percentiles of the bootstrap distribution, widened for small samples: at alpha' =
        Phi(-sqrt(n / (n - 1)) t(alpha / 2, n - 1)) for n documents.

        Source: Hesterberg, "What Teachers Should Know About the Bootstrap" (2015), 5.3, the expanded
        percentile interval.
        """
        values = np.asarray(columns, dtype=np.float64)  # [columns, documents]
        documents = values.shape[1]
        if documents < FEWEST_DOCUMENTS:
            return None
        drawn = statistic(*self._means(values))
        tail = expanded_tail(documents)
        low, high = map(float, np.quantile(drawn, (tail, 1 - tail)))
        return low, high

    def _means(self, values: Floats) -> Floats:
        """Return the means over resampled documents, [columns, resamples]."""
        documents = values.shape[1]
        size = max(1, _DRAWN // documents)
        starts = range(0, self.resamples, size)
        parts = [values @ self._weights(documents, min(size, self.resamples - at), at) for at in starts]
        means: Floats = np.concatenate(parts, axis=1) / documents
        return means

    def _weights(self, documents: int, count: int, start: int) -> npt.NDArray[np.float32]:
        """Return how often each document is drawn, [documents, count], in `count` resamples from `start`."""
        kept = self._drawn.get((documents, start))
        if kept is None:
            random = np.random.default_rng([self.seed, start])
            drawn = random.multinomial(documents, np.full(documents, 1 / documents), size=count)
            kept = np.ascontiguousarray(drawn.T, dtype=np.float32)
            if len(self._drawn) >= _KEPT:
                self._drawn.pop(next(iter(self._drawn)))
            self._drawn[documents, start] = kept
        return kept


def expanded_tail(documents: int) -> float:
    """Return the share of the bootstrap distribution that is excluded at each end."""
    t = _t_quantile((1 + CONFIDENCE) / 2, documents - 1)
    return NormalDist().cdf(-math.sqrt(documents / (documents - 1)) * t)


def _t_quantile(p: float, freedom: int) -> float:
    """Return Student's t quantile, accurate to 0.003 from 5 degrees of freedom on.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    z = NormalDist().inv_cdf(p)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return math.fsum(term / float(freedom) ** power for power, term in enumerate(terms))


def share_interval(hits: int, trials: int) -> Interval | None:
    """Return `wilson_interval`, or None if there are too few trials."""
    return None if trials < FEWEST_DOCUMENTS else wilson_interval(hits, trials)


def wilson_interval(hits: int, trials: int) -> Interval:
    """Return a two-sided 95% interval for a share of independent trials.

    Unlike a bootstrap interval, this interval has nonzero width even if all trials have the same outcome.

    Source: Wilson, "Probable Inference, the Law of Succession, and Statistical Inference" (1927).
    """
    z = Z95
    share = hits / trials
    middle = share + z**2 / (2 * trials)
    half = z * math.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2)
    scale = 1 + z**2 / trials
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def change_text(change: float, interval: Interval | None, documents: int) -> str:
    """Format a relative change as its interval, with enough digits to distinguish the bounds."""
    if interval is None:
        return f"{change:+.2%}; {documents} documents are too few for an interval"
    low, high = interval
    width = max(high - low, 1e-7)
    digits = min(4, max(2, 1 - math.floor(math.log10(100 * width))))
    return f"{low:+.{digits}%} .. {high:+.{digits}%} ({CONFIDENCE:.0%})"
