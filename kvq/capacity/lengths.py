"""Request lengths: drawn at random one by one, or all together for a plan."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

from kvq.capacity.trace_file import read_lines
from kvq.errors import ConfigError
from kvq.sizes import parse_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Token counts: uniform between `low` and `high`, or log-normal around `low` where `sigma` is given."""

    low: int
    high: int
    sigma: float | None = None  # of the logarithm

    def draw(self, rng: random.Random) -> int:
        """Draw one length, at least 1."""
        if self.sigma is None:
            return rng.randint(self.low, self.high)
        return max(1, round(rng.lognormvariate(math.log(self.low), self.sigma)))


def parse_lengths(text: str, option: str) -> Lengths:
    """Read lengths from "128", "16:512" (uniform) or "lognormal:MEDIAN:SIGMA".

    Raises:
        ConfigError: none of these.
    """
    words = text.split(":")
    try:
        if words[0] == "lognormal" and len(words) == 3:
            median, sigma = parse_tokens(words[1]), float(words[2])
            if median >= 1 and 0 <= sigma <= 10:
                return Lengths(low=median, high=median, sigma=sigma)
        elif len(words) <= 2:
            low, high = parse_tokens(words[0]), parse_tokens(words[-1])
            if 1 <= low <= high:
                return Lengths(low=low, high=high)
    except ValueError:  # as ConfigError is
        pass
    raise ConfigError(f"{option} takes tokens such as 128, 8k, 16:512 or lognormal:256:0.7, got {text!r}")


_QUANTILES = 1000  # points that stand for a distribution


@dataclass(frozen=True, slots=True)
class Length:
    """Token counts of one request."""

    prompt: int
    output: int

    @property
    def total(self) -> int:
        """Tokens at the end of the request."""
        return self.prompt + self.output


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """Memory demand of requests: their lengths, and their shared prefix."""

    lengths: Sequence[Length]  # that stand for all of them
    slot_tokens: int | None = None  # that an engine without blocks reserves for each; None: for the longest
    prefix_share: float = 0.0  # of the prompts, what all requests have in common

    def __post_init__(self) -> None:
        if not 0 <= self.prefix_share < 1:
            raise ConfigError(f"the prefix share must be 0 to below 1, got {self.prefix_share}")
        if self.slot < self.longest:
            raise ConfigError(f"a slot of {self.slot} tokens does not hold a request of {self.longest}")

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max(length.total for length in self.lengths)

    @property
    def slot(self) -> int:
        """Tokens that an engine without blocks reserves for each request."""
        return self.slot_tokens or self.longest


def fixed(context: int, output: int = 0) -> list[Length]:
    """Return one length for all requests: `context` tokens, of which `output` are generated.

    Raises:
        ConfigError: not a positive number, or more output than context.
    """
    if context < 1 or not 0 <= output < context:
        raise ConfigError(f"a context of {context} tokens with {output} of output is none")
    return [Length(context - output, output)]


def lognormal(median: int, sigma: float, *, most: int) -> list[Length]:
    """Return quantiles of log-normal total lengths, half of them output, cut at the model's context.

    Raises:
        ConfigError: a number out of its range.
    """
    if median < 1 or not 0 < sigma <= 5:
        raise ConfigError(
            f"log-normal lengths need a median of at least 1 and a sigma of 0 to 5, got {median}, {sigma}"
        )
    normal = NormalDist(math.log(median), sigma)
    found = []
    for i in range(_QUANTILES):
        tokens = max(2, min(most, round(math.exp(normal.inv_cdf((i + 0.5) / _QUANTILES)))))
        output = min(tokens - 1, round(tokens / 2))
        found.append(Length(tokens - output, output))
    return found


def read_trace(path: Path) -> list[Length]:
    """Read the lengths of a trace; see `kvq.capacity.trace_file`.

    Raises:
        ConfigError: no such file, or a line that is none.
    """
    found = [Length(line.prompt_tokens, line.output_tokens) for line in read_lines(path)]
    if not found:
        raise ConfigError(f'{path} has no lines such as {{"prompt_tokens": 900, "output_tokens": 100}}')
    return found
