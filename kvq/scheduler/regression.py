"""A linear estimate that follows noisy measurements."""

from collections.abc import Sequence
from math import sqrt

_OUTLIER = 3.0  # standard deviations; what lies further off counts as that far
_DRIFT = 0.05  # how far coefficients may have moved from one measurement to the next, relative


class Regression:
    """Coefficients, none below 0, of which each measurement shows one weighted sum: a Kalman filter.

    What a measurement differs by is put down to the coefficients that are known least and weigh most in
    it. (R. E. Kalman, 1960, with a random walk as the state's own motion.)
    """

    def __init__(self, coefficients: Sequence[float], deviations: Sequence[float]) -> None:
        """First guesses and their standard deviations."""
        self.coefficients = list(coefficients)
        n = len(self.coefficients)
        self._covariance = [[deviations[i] ** 2 if i == j else 0.0 for j in range(n)] for i in range(n)]

    def __call__(self, weights: Sequence[float]) -> float:
        """The estimate of a weighted sum."""
        return sum(c * w for c, w in zip(self.coefficients, weights, strict=True))

    def observe(self, weights: Sequence[float], measured: float, deviation: float) -> None:
        """Learn from one measured sum and its standard deviation."""
        spread = [sum(p * w for p, w in zip(row, weights, strict=True)) for row in self._covariance]
        variance = sum(s * w for s, w in zip(spread, weights, strict=True)) + deviation**2
        furthest = _OUTLIER * sqrt(variance)
        off = min(max(measured - self(weights), -furthest), furthest)
        for i, s in enumerate(spread):
            row = self._covariance[i]
            for j, other in enumerate(spread):
                row[j] -= s * other / variance
            self.coefficients[i] = max(0.0, self.coefficients[i] + s * off / variance)
            row[i] += (_DRIFT * self.coefficients[i]) ** 2
