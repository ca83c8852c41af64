"""What every calibrated list of numbers in a kvq.json has: a check of its numbers, and a digest.

The digest is over the model, the layer, the field's name and the numbers, so that a list that was moved to
another layer or field, cut, reordered or edited is found, and named.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple

from kvq.errors import ConfigError

LARGEST = float.fromhex("0x1.fffffep127")  # the largest fp32 number
_DIGEST_CHARACTERS = 16
AGAIN = "make the file again: `kvq calibrate MODEL --out kvq.json`, or `kvq tune` if that made it"


class Header(NamedTuple):
    """What calibrated numbers come from."""

    model_digest: str
    text_digest: str
    tokens: int


def field_digest(model_digest: str, layer: int, field: str, values: object) -> str:
    """The first 16 hex digits of SHA-256 of a field's numbers and of where they belong."""
    text = json.dumps([model_digest, layer, field, values])
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARACTERS]


def check_model(what: str, found: str, expected: str) -> None:
    """Raise ConfigError unless what was calibrated belongs to the model with that digest."""
    if found != expected:
        raise ConfigError(
            f"these {what} belong to another model (digest {found[:12]}, this model is {expected[:12]}); "
            f"{AGAIN}"
        )


def read_header(name: str, data: object) -> tuple[Header, list[object]]:
    """Where a calibrated object's numbers come from, and its layers, unread.

    Raises:
        ConfigError: a key is missing or too many, or of another type.
    """
    keys = ("model_digest", "text_digest", "tokens", "layers")
    if not isinstance(data, dict) or set(data) != set(keys):
        raise ConfigError(f"{name} must hold model_digest, text_digest, tokens and layers")
    tokens, layers = data["tokens"], data["layers"]
    if not isinstance(layers, list) or isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
        raise ConfigError(f"{name}.layers must be a list and {name}.tokens a number")
    return Header(str(data["model_digest"]), str(data["text_digest"]), tokens), layers


def check_numbers(where: str, values: object, *, positive: bool) -> tuple[float, ...]:
    """A JSON list as floats.

    Raises:
        ConfigError: no list, empty, or not all finite fp32 numbers (above zero, if `positive`).
    """
    wanted = "finite numbers above 0" if positive else "finite numbers"
    if not isinstance(values, list) or not values or not all(_is_number(x, positive) for x in values):
        raise ConfigError(f"{where} must be a list of {wanted}{_first_bad(values, positive)}; {AGAIN}")
    return tuple(float(x) for x in values)


def check_digest(where: str, found: object, expected: str) -> None:
    """Raise ConfigError unless a field's digest is that of its numbers, layer and model."""
    if found != expected:
        raise ConfigError(
            f"{where} is not what calibration wrote there: its numbers were changed, reordered or moved "
            f"from another layer or model; {AGAIN}"
        )


def check_shape(where: str, found: Sequence[object], expected: int, what: str) -> None:
    """Raise ConfigError unless a list has the length that the model's geometry asks for."""
    if len(found) != expected:
        raise ConfigError(f"{where} holds {len(found)} {what}, expected {expected}; {AGAIN}")


def _is_number(x: object, positive: bool) -> bool:
    if isinstance(x, bool) or not isinstance(x, int | float):
        return False
    return 0 < x <= LARGEST if positive else -LARGEST <= x <= LARGEST


def _first_bad(values: object, positive: bool) -> str:
    if not isinstance(values, list) or not values:
        return f", got {values!r:.40}"
    index = next(i for i, x in enumerate(values) if not _is_number(x, positive))
    return f", got {values[index]!r:.40} at place {index}"
