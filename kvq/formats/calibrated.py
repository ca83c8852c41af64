"""Calibration results in a kvq.json: static scales and centers, each a list of numbers with a digest.

A digest covers the model, the layer, the field's name and the numbers. If a list was moved to another layer
or field, truncated, reordered or edited, this is detected, and the error names the list.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Generic, Self, TypeVar

from kvq.errors import ConfigError
from kvq.formats.spec import KVFormat

SMALLEST_MAXIMUM = 2.0**-100  # of a head that was always zero, so that no stored scale is zero
_SMALLEST_SCALE = 2.0**-126  # the smallest normal fp32 number: a scale never rounds to zero
_LARGEST = float.fromhex("0x1.fffffep127")  # the largest fp32 number
_DIGEST_CHARACTERS = 16
AGAIN = "make the file again: `kvq calibrate MODEL --out kvq.json`, or `kvq tune` if that made it"

HeadCenters = tuple[tuple[float, ...], ...]  # [kv_heads][head_dim]
Layer = TypeVar("Layer")  # a dataclass whose fields are tuples of numbers, tuples of such tuples, or None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Calibrated(Generic[Layer]):
    """Calibrated numbers for every layer of one model, and information on their origin."""

    name: ClassVar[str]  # in kvq.json
    kind: ClassVar[Any]  # type of each layer; its `read(where, data)` checks the lists of a JSON object

    model_digest: str  # of the weights that they were observed on
    text_digest: str  # SHA-256 of the calibration text
    tokens: int
    layers: tuple[Layer, ...]

    def to_json(self) -> dict[str, object]:
        """Return the JSON object that kvq.json stores under `name`."""
        layers = []
        for index, layer in enumerate(self.layers):
            lists = {field.name: _lists(getattr(layer, field.name)) for field in fields(self.kind)}
            layers.append({**lists, "digests": self._digests(self.model_digest, index, layer)})
        header = {key: getattr(self, key) for key in ("model_digest", "text_digest", "tokens")}
        return {**header, "layers": layers}

    def share(self, rank: int, processes: int) -> Self:
        """Return the numbers for the KV heads of process `rank`; processes share heads if there are fewer."""
        names = [field.name for field in fields(self.kind)]
        layers = [
            self.kind(**{name: _share(getattr(layer, name), rank, processes) for name in names})
            for layer in self.layers
        ]
        return replace(self, layers=tuple(layers))

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read an object written by `to_json`, and check every number and every list's digest.

        Raises:
            ConfigError: a key is missing or unknown, a number is out of range, or a list is not the
                one that was written for its layer and field.
        """
        keys = ("model_digest", "text_digest", "tokens", "layers")
        if not isinstance(data, dict) or set(data) != set(keys):
            raise ConfigError(f"{cls.name} must hold model_digest, text_digest, tokens and layers; {AGAIN}")
        model_digest, text_digest, tokens, layers = (data[key] for key in keys)
        if not isinstance(layers, list) or type(tokens) is not int or tokens < 0:
            raise ConfigError(f"{cls.name}.layers must be a list and {cls.name}.tokens a number; {AGAIN}")
        if not isinstance(model_digest, str) or not isinstance(text_digest, str):
            raise ConfigError(
                f"{cls.name}.model_digest and {cls.name}.text_digest must be texts, got {model_digest!r:.40} "
                f"and {text_digest!r:.40}; {AGAIN}"
            )
        return cls(
            model_digest=model_digest,
            text_digest=text_digest,
            tokens=tokens,
            layers=tuple(cls._layer(model_digest, index, layer) for index, layer in enumerate(layers)),
        )

    @classmethod
    def _layer(cls, model_digest: str, index: int, data: object) -> Any:
        where, parts = f"{cls.name}.layers[{index}]", [field.name for field in fields(cls.kind)]
        if not isinstance(data, dict) or set(data) != {*parts, "digests"}:
            raise ConfigError(f"{where} must hold {', '.join(parts)} and digests; {AGAIN}")
        layer = cls.kind.read(where, data)
        digests = data["digests"]
        if not isinstance(digests, dict) or not set(digests) <= set(parts):
            raise ConfigError(f"{where}.digests must hold those of {', '.join(parts)}; {AGAIN}")
        for part, expected in cls._digests(model_digest, index, layer).items():
            check_digest(f"{where}.{part}", digests.get(part), expected)
        return layer

    @staticmethod
    def _digests(model_digest: str, index: int, layer: Any) -> dict[str, str]:
        return {
            field.name: field_digest(model_digest, index, field.name, getattr(layer, field.name))
            for field in fields(layer)
        }


def _share(heads: tuple[Any, ...] | None, rank: int, processes: int) -> tuple[Any, ...] | None:
    if heads is None:
        return None
    first = rank * len(heads) // processes
    return heads[first : first + max(1, len(heads) // processes)]


def _lists(values: Any) -> Any:
    return [_lists(x) for x in values] if isinstance(values, tuple) else values


def field_digest(model_digest: str, layer: int, field: str, values: object) -> str:
    """Return the first 16 hex digits of the SHA-256 of a field's model, layer, name and numbers."""
    text = json.dumps([model_digest, layer, field, values])
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARACTERS]


def check_model(what: str, found: str, expected: str) -> None:
    """Raise ConfigError unless calibration results were made for the model with the digest `expected`."""
    if found != expected:
        raise ConfigError(
            f"these {what} belong to another model (digest {found[:12]}, this model is {expected[:12]}); "
            f"{AGAIN}"
        )


def check_numbers(where: str, values: object, *, positive: bool) -> tuple[float, ...]:
    """Return the numbers in a JSON list as floats.

    Raises:
        ConfigError: the value is not a list of finite fp32 numbers (above 0 if `positive`), or it is empty.
    """
    wanted = "finite numbers above 0" if positive else "finite numbers"
    if not isinstance(values, list) or not values or not all(_is_number(x, positive) for x in values):
        raise ConfigError(f"{where} must be a list of {wanted}{_first_bad(values, positive)}; {AGAIN}")
    return tuple(float(x) for x in values)


def check_digest(where: str, found: object, expected: str) -> None:
    """Raise ConfigError unless a field's digest matches its numbers, layer and model."""
    if found != expected:
        raise ConfigError(
            f"{where} is not what calibration wrote there: its numbers were changed, reordered or moved "
            f"from another layer or model; {AGAIN}"
        )


def check_shape(where: str, found: Sequence[object], expected: int, what: str) -> None:
    """Raise ConfigError unless a list has the length required by the model's geometry."""
    if len(found) != expected:
        raise ConfigError(f"{where} holds {len(found)} {what}, expected {expected}; {AGAIN}")


def _is_number(x: object, positive: bool) -> bool:
    if isinstance(x, bool) or not isinstance(x, int | float):
        return False
    return 0 < x <= _LARGEST if positive else -_LARGEST <= x <= _LARGEST


def _first_bad(values: object, positive: bool) -> str:
    if not isinstance(values, list) or not values:
        return f", got {values!r:.40}"
    index = next(i for i, x in enumerate(values) if not _is_number(x, positive))
    return f", got {values[index]!r:.40} at place {index}"


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadMaxima:  # D7: maxima, not scales: one calibration for FP8 and INT8
    """Largest absolute values per KV head of one layer, also after the Hadamard rotation if measured."""

    k: tuple[float, ...]
    v: tuple[float, ...]
    k_rotated: tuple[float, ...] | None = None
    v_rotated: tuple[float, ...] | None = None

    def scales(self, part: str, fmt: KVFormat) -> tuple[float, ...]:
        """Return the static fp32 scales of `part` ("k" or "v") for a per-head format, one per KV head.

        scale = max(amax / 448, 2**-126) for FP8, amax / 127 for INT8.
        """
        maxima: tuple[float, ...] | None = getattr(self, part + ("_rotated" if fmt.rotated else ""))
        if maxima is None:
            raise ConfigError(
                f"{fmt.name} rotates {part.upper()}, and the checkpoint's scales are of what is not; leave "
                f"out _rot, or run `kvq calibrate MODEL --out kvq.json` and pass `--scales kvq.json`"
            )
        return tuple(max(a / fmt.code.largest, _SMALLEST_SCALE) for a in maxima)

    @classmethod
    def read(cls, where: str, data: dict[str, Any]) -> Self:
        """Read lists that contain one positive number per KV head."""
        parts = [field.name for field in fields(cls)]
        parts = [part for part in parts if data[part] is not None or not part.endswith("_rotated")]
        heads = {part: check_numbers(f"{where}.{part}", data[part], positive=True) for part in parts}
        for part, maxima in heads.items():
            check_shape(f"{where}.{part}", maxima, len(heads["k"]), "heads")
        return cls(**heads)


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticScales(_Calibrated[HeadMaxima]):
    """Calibrated maxima for every layer of one model."""

    name: ClassVar = "static_scales"
    kind: ClassVar = HeadMaxima

    def check(self, *, model_digest: str, kv_heads: list[int]) -> None:
        """Raise ConfigError unless these scales were calibrated for the given model."""
        check_model("static scales", self.model_digest, model_digest)
        found = [len(layer.k) for layer in self.layers]
        if found != kv_heads:
            raise ConfigError(
                f"static scales hold {found} KV heads per layer, the model has {kv_heads}; "
                f"run `kvq calibrate MODEL --out kvq.json`"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCenters:
    """Centers of one layer; None if K or V is not centered."""

    k: HeadCenters | None = None
    v: HeadCenters | None = None

    @classmethod
    def read(cls, where: str, data: dict[str, Any]) -> Self:
        """Read the centers of K and of V: each a list with one list per KV head, or null."""
        return cls(**{part: _rows(f"{where}.{part}", data[part]) for part in ("k", "v")})


@dataclass(frozen=True, kw_only=True, slots=True)
class Centers(_Calibrated[LayerCenters]):
    """Calibrated per-channel means of K (after RoPE) and V, which grouped formats need not store.

    K - c changes all scores of a query by the same number, which softmax cancels. V - c reduces every output
    by c, which is added back. A constant offset, such as a key bias that survives RoPE, therefore costs no
    bits. Source: Zhang et al. 2024, SageAttention, section 4.2 (smoothing K, with means per sequence).
    """

    name: ClassVar = "centers"
    kind: ClassVar = LayerCenters

    def check(self, *, model_digest: str, kv_heads: list[int]) -> None:
        """Raise ConfigError unless these centers were calibrated for the given model."""
        check_model("centers", self.model_digest, model_digest)
        check_shape("centers.layers", self.layers, len(kv_heads), "layers")
        for index, (layer, heads) in enumerate(zip(self.layers, kv_heads, strict=True)):
            for part, rows in (("k", layer.k), ("v", layer.v)):
                if rows is not None:
                    check_shape(f"centers.layers[{index}].{part}", rows, heads, "KV heads")

    def some(self, wanted: Iterable[tuple[bool, bool]]) -> "Centers":
        """Return only the selected centers; `wanted` has one pair of flags (K, V) for each layer."""
        layers = (
            LayerCenters(k=own.k if k else None, v=own.v if v else None)
            for own, (k, v) in zip(self.layers, wanted, strict=True)
        )
        return replace(self, layers=tuple(layers))


def _rows(where: str, data: object) -> HeadCenters | None:
    if data is None:
        return None
    if not isinstance(data, list) or not data:
        raise ConfigError(f"{where} must be null or a list of one list per KV head; {AGAIN}")
    rows = tuple(check_numbers(f"{where}[{head}]", row, positive=False) for head, row in enumerate(data))
    for head, row in enumerate(rows):
        check_shape(f"{where}[{head}]", row, len(rows[0]), "channels")
    return rows
