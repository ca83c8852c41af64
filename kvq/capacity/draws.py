"""Lengths of requests, drawn from a distribution."""

import math
import random
from dataclasses import dataclass

from kvq.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Token counts: uniform between `low` and `high`, or log-normal around `low` where `sigma` is given."""

    low: int
    high: int
    sigma: float | None = None  # of the logarithm

    def draw(self, rng: random.Random) -> int:
        """One length, at least 1."""
        if self.sigma is None:
            return rng.randint(self.low, self.high)
        return max(1, round(rng.lognormvariate(math.log(self.low), self.sigma)))


def parse_lengths(text: str, option: str) -> Lengths:
    """Lengths from "128", "16:512" (uniform) or "lognormal:MEDIAN:SIGMA".

    Raises:
        ConfigError: none of these.
    """
    words = text.split(":")
    try:
        if words[0] == "lognormal" and len(words) == 3:
            median, sigma = int(words[1]), float(words[2])
            if median >= 1 and 0 <= sigma <= 10:
                return Lengths(low=median, high=median, sigma=sigma)
        elif len(words) <= 2:
            low, high = int(words[0]), int(words[-1])
            if 1 <= low <= high:
                return Lengths(low=low, high=high)
    except ValueError:
        pass
    raise ConfigError(f"{option} takes tokens such as 128, 16:512 or lognormal:256:0.7, got {text!r}")
