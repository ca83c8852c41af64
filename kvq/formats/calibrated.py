"""What every calibrated list of numbers in a kvq.json has: a check of its numbers, and a digest.

The digest is over the model, the layer, the field's name and the numbers, so that a list that was moved to
another layer or field, cut, reordered or edited is found, and named.
"""

import hashlib
import json
from collections.abc import Sequence

from kvq.errors import ConfigError

LARGEST = float.fromhex("0x1.fffffep127")  # the largest fp32 number
_DIGEST_CHARACTERS = 16
AGAIN = "make the file again: `kvq calibrate MODEL --out kvq.json`, or `kvq tune` if that made it"


def field_digest(model_digest: str, layer: int, field: str, values: object) -> str:
    """The first 16 hex digits of SHA-256 of a field's numbers and of where they belong."""
    text = json.dumps([model_digest, layer, field, values])
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARACTERS]


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
