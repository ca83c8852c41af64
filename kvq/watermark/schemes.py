"""Watermark schemes: green lists and tournaments, and their parameters."""

from dataclasses import asdict, dataclass, fields
from typing import ClassVar

from kvq.errors import ConfigError, unknown

MAX_CONTEXT = 16  # tokens
MAX_LAYERS = 64  # bits of a token's random word, one per layer
MAX_DELTA = 100.0
# D267: `always` refuses requests that can't be marked
MODES = ("off", "asked", "unless-declined", "always")  # which texts an engine marks, by who decides


@dataclass(frozen=True, kw_only=True, slots=True)
class Green:
    """Scheme that adds `delta` to the logits of green tokens, a share `gamma` of the vocabulary.

    Which tokens are green depends on the `context` preceding tokens. Each pair of context and token is green
    independently, so the number of green tokens in an unmarked text is exactly binomial. The scheme also
    works at temperature 0, and it changes token probabilities.

    Source: Kirchenbauer et al. 2023, "A Watermark for Large Language Models", algorithm 2 (soft red list).
    """

    tag: ClassVar[bytes] = b"green"  # domain of its random words
    context: int = 2  # tokens
    gamma: float = 0.25  # share of green tokens
    delta: float = 2.0  # nats

    def __post_init__(self) -> None:
        _check(self, "context", 1, MAX_CONTEXT)
        _check(self, "gamma", 0.01, 0.99)
        _check(self, "delta", 0.01, MAX_DELTA)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tournament:
    """Scheme that samples 2**layers candidates and selects one by a pairwise tournament of random bits.

    Averaged over all keys, tokens are as likely as without the tournament. A context that occurred earlier in
    the text is skipped, since its bits would be the same. Greedy text is not sampled, so it can't be marked.

    Source: Dathathri et al. 2024, "Scalable watermarking for identifying large language model outputs",
    Nature 634 (SynthID-Text): non-distortionary, two candidates.
    """

    tag: ClassVar[bytes] = b"tournament"  # domain of its random words
    context: int = 4  # tokens
    layers: int = 20

    def __post_init__(self) -> None:
        _check(self, "context", 1, MAX_CONTEXT)
        _check(self, "layers", 1, MAX_LAYERS)


Scheme = Green | Tournament
SCHEMES: dict[str, type[Green] | type[Tournament]] = {"green": Green, "tournament": Tournament}


def parse_scheme(text: str) -> Scheme:
    """Parse a scheme's name, followed by the numbers that differ from the defaults: `green,delta=3`.

    Raises:
        ConfigError: the scheme or a number is unknown, or a number is out of range.
    """
    name, *given = text.split(",") if isinstance(text, str) else [repr(text)]
    kind = SCHEMES.get(name)
    if kind is None:
        raise ConfigError(unknown("watermark scheme", name, SCHEMES))
    known = {field.name: field.type for field in fields(kind)}
    numbers: dict[str, int | float] = {}
    for one in given:
        key, _, value = one.partition("=")
        if key not in known or key in numbers:
            raise ConfigError(
                f"{text!r} must be {name} and its numbers, each once, as {spelled(kind())}, got {one!r}"
            )
        numbers[key] = _number(value, one)
    return kind(**numbers)  # type: ignore[arg-type]


def spelled(scheme: Scheme) -> str:
    """Return a scheme in the form that `parse_scheme` reads, with all numbers."""
    name = next(name for name, kind in SCHEMES.items() if isinstance(scheme, kind))
    return ",".join([name, *(f"{key}={value}" for key, value in asdict(scheme).items())])


def _number(value: str, given: str) -> int | float:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    raise ConfigError(f"{given!r} is no number of a watermark scheme; write NAME=NUMBER")


def _check(scheme: Scheme, name: str, low: float, high: float) -> None:
    """Raise ConfigError unless a number is within its bounds, and an integer if the bounds are integers."""
    value, is_whole = getattr(scheme, name), isinstance(low, int)
    is_number = isinstance(value, int if is_whole else int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        kind, what = type(scheme).__name__.lower(), "a whole number" if is_whole else "a number"
        raise ConfigError(f"{name} of {kind} must be {what} of {low:g} to {high:g}, got {value!r}")
