"""How a text is marked: green lists or a tournament, and the numbers of each."""

from dataclasses import asdict, dataclass, fields
from math import isfinite

from kvq.errors import ConfigError, nearest

MAX_CONTEXT = 16  # tokens
MAX_LAYERS = 64  # bits of a token's random word, one a layer
MAX_DELTA = 100.0
MODES = ("off", "asked", "unless-declined", "always")  # which texts an engine marks, by who decides


@dataclass(frozen=True, kw_only=True, slots=True)
class Green:
    """A token in `gamma` of all, chosen by the `context` tokens before it, gets `delta` added to its logit.

    Whether a token is green is drawn for each context and token, so a text without the mark has as many
    green tokens as a binomial variable, exactly. Works at temperature 0 too, and changes what is likely.

    Source: Kirchenbauer et al. 2023, "A Watermark for Large Language Models", algorithm 2 (soft red list).
    """

    context: int = 2  # tokens
    gamma: float = 0.25  # share of green tokens
    delta: float = 2.0  # nats

    def __post_init__(self) -> None:
        _check_whole(self, "context", 1, MAX_CONTEXT)
        _check_real(self, "gamma", 0.01, 0.99)
        _check_real(self, "delta", 0.01, MAX_DELTA)

    @property
    def tag(self) -> bytes:
        """What its random words are drawn for."""
        return b"green"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tournament:
    """The token is the winner of a tournament among 2**layers drawn ones, in pairs, by bits of their own.

    Over all keys tokens are as likely as without it. A context that came before in the text is passed
    over, since its bits would be the same. Greedy text has nothing to draw, so it can't be marked.

    Source: Dathathri et al. 2024, "Scalable watermarking for identifying large language model outputs",
    Nature 634 (SynthID-Text): non-distortionary, two candidates.
    """

    context: int = 4  # tokens
    layers: int = 20

    def __post_init__(self) -> None:
        _check_whole(self, "context", 1, MAX_CONTEXT)
        _check_whole(self, "layers", 1, MAX_LAYERS)

    @property
    def tag(self) -> bytes:
        """What its random words are drawn for."""
        return b"tournament"


Scheme = Green | Tournament
SCHEMES: dict[str, type[Green] | type[Tournament]] = {"green": Green, "tournament": Tournament}


def parse_scheme(text: str) -> Scheme:
    """A scheme from its name and those of its numbers that are unusual: `green,delta=3`.

    Raises:
        ConfigError: no such scheme or number, or one out of range.
    """
    name, *given = text.split(",") if isinstance(text, str) else [repr(text)]
    kind = SCHEMES.get(name)
    if kind is None:
        hint = nearest(name, [*SCHEMES]) or ";"
        raise ConfigError(f"unknown watermark scheme {name!r}{hint} known: {', '.join(SCHEMES)}")
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
    """The text that `parse_scheme` makes it of, with all its numbers."""
    name = next(name for name, kind in SCHEMES.items() if isinstance(scheme, kind))
    return ",".join([name, *(f"{key}={value}" for key, value in asdict(scheme).items())])


def _number(value: str, given: str) -> int | float:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    raise ConfigError(f"{given!r} is no number of a watermark scheme; write NAME=NUMBER")


def _check_whole(scheme: Scheme, name: str, low: int, high: int) -> None:
    value = getattr(scheme, name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        kind = type(scheme).__name__.lower()
        raise ConfigError(f"{name} of {kind} must be a whole number of {low} to {high}, got {value!r}")


def _check_real(scheme: Scheme, name: str, low: float, high: float) -> None:
    value = getattr(scheme, name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not isfinite(value) or not low <= value <= high:
        kind = type(scheme).__name__.lower()
        raise ConfigError(f"{name} of {kind} must be a number of {low:g} to {high:g}, got {value!r}")
