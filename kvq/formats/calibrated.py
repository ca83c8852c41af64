"""What every calibrated list of numbers in a kvq.json has: a check of its numbers, and a digest.

The digest is over the model, the layer, the field's name and the numbers, so that a list that was moved to
another layer or field, cut, reordered or edited is found, and named.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, Self, TypeVar

from kvq.errors import ConfigError

LARGEST = float.fromhex("0x1.fffffep127")  # the largest fp32 number
_DIGEST_CHARACTERS = 16
AGAIN = "make the file again: `kvq calibrate MODEL --out kvq.json`, or `kvq tune` if that made it"


Layer = TypeVar("Layer")  # a dataclass whose fields are tuples of numbers, of such tuples, or None


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibrated(Generic[Layer]):
    """Numbers of every layer of one model, and what they come from."""

    name: ClassVar[str]  # in kvq.json
    kind: ClassVar[Any]  # of `layers`; its `read(where, data)` checks the lists of a JSON object

    model_digest: str  # the weights they were observed on
    text_digest: str  # SHA-256 of the calibration text
    tokens: int
    layers: tuple[Layer, ...]

    def to_json(self) -> dict[str, object]:
        """The JSON object kept in kvq.json under `name`."""
        layers = []
        for index, layer in enumerate(self.layers):
            lists = {field.name: _lists(getattr(layer, field.name)) for field in fields(self.kind)}
            layers.append({**lists, "digests": self._digests(self.model_digest, index, layer)})
        header = {key: getattr(self, key) for key in ("model_digest", "text_digest", "tokens")}
        return {**header, "layers": layers}

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read `to_json`'s object, checking every number and every list's digest.

        Raises:
            ConfigError: a key is missing or too many, a number is not what it may be, or a list is not the
                one that was written for its layer and field.
        """
        keys = ("model_digest", "text_digest", "tokens", "layers")
        if not isinstance(data, dict) or set(data) != set(keys):
            raise ConfigError(f"{cls.name} must hold model_digest, text_digest, tokens and layers")
        tokens, layers = data["tokens"], data["layers"]
        is_number = isinstance(tokens, int) and not isinstance(tokens, bool)
        if not isinstance(layers, list) or not is_number or tokens < 0:
            raise ConfigError(f"{cls.name}.layers must be a list and {cls.name}.tokens a number")
        model_digest = str(data["model_digest"])
        return cls(
            model_digest=model_digest,
            text_digest=str(data["text_digest"]),
            tokens=tokens,
            layers=tuple(cls._layer(model_digest, index, layer) for index, layer in enumerate(layers)),
        )

    @classmethod
    def _layer(cls, model_digest: str, index: int, data: object) -> Any:
        where, parts = f"{cls.name}.layers[{index}]", [field.name for field in fields(cls.kind)]
        if not isinstance(data, dict) or set(data) != {*parts, "digests"}:
            raise ConfigError(f"{where} must hold {', '.join(parts)} and digests; {AGAIN}")
        layer = cls.kind.read(where, data)
        digests = data["digests"] if isinstance(data["digests"], dict) else {}
        for part, expected in cls._digests(model_digest, index, layer).items():
            check_digest(f"{where}.{part}", digests.get(part), expected)
        return layer

    @staticmethod
    def _digests(model_digest: str, index: int, layer: Any) -> dict[str, str]:
        return {
            field.name: field_digest(model_digest, index, field.name, getattr(layer, field.name))
            for field in fields(layer)
        }


def _lists(values: Any) -> Any:
    return [_lists(x) for x in values] if isinstance(values, tuple) else values


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
