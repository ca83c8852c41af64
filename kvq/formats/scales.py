"""Static scales: what calibration saw of K and V, per layer and KV head."""

from dataclasses import dataclass

from kvq.errors import ConfigError
from kvq.formats.calibrated import (
    AGAIN,
    check_digest,
    check_model,
    check_numbers,
    check_shape,
    field_digest,
    read_header,
)
from kvq.formats.spec import KVFormat

SMALLEST_MAXIMUM = 2.0**-100  # of a head that was always zero: a file holds no zero scale
_SMALLEST_SCALE = 2.0**-126  # the smallest normal fp32 number: a scale never rounds to zero
PARTS = ("k", "v", "k_rotated", "v_rotated")


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadMaxima:
    """Largest absolute value per KV head of one layer, before and after the Hadamard rotation."""

    k: tuple[float, ...]
    v: tuple[float, ...]
    k_rotated: tuple[float, ...]
    v_rotated: tuple[float, ...]

    def scales(self, part: str, fmt: KVFormat) -> tuple[float, ...]:
        """Static fp32 scales of `part` ("k" or "v") for a per-head format, one per KV head.

        scale = max(amax / 448, 2**-126) for FP8, amax / 127 for INT8.
        """
        maxima: tuple[float, ...] = getattr(self, part + ("_rotated" if fmt.rotated else ""))
        return tuple(max(a / fmt.code.largest, _SMALLEST_SCALE) for a in maxima)


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticScales:
    """Calibrated maxima of every layer of one model."""

    model_digest: str  # the weights they were observed on
    text_digest: str  # SHA-256 of the calibration text
    tokens: int
    layers: tuple[HeadMaxima, ...]

    def check(self, *, model_digest: str, kv_heads: list[int]) -> None:
        """Raise ConfigError unless these scales were made for that model."""
        check_model("static scales", self.model_digest, model_digest)
        found = [len(layer.k) for layer in self.layers]
        if found != kv_heads:
            raise ConfigError(
                f"static scales hold {found} KV heads per layer, the model has {kv_heads}; "
                f"run `kvq calibrate MODEL --out kvq.json`"
            )

    def to_json(self) -> dict[str, object]:
        """The JSON object kept in kvq.json under `static_scales`."""
        return {
            "model_digest": self.model_digest,
            "text_digest": self.text_digest,
            "tokens": self.tokens,
            "layers": [self._layer_json(index, layer) for index, layer in enumerate(self.layers)],
        }

    def _layer_json(self, index: int, layer: HeadMaxima) -> dict[str, object]:
        lists = {part: list(getattr(layer, part)) for part in PARTS}
        digests = {part: field_digest(self.model_digest, index, part, lists[part]) for part in PARTS}
        return {**lists, "digests": digests}

    @classmethod
    def from_json(cls, data: object) -> "StaticScales":
        """Read `to_json`'s object, checking every number and every list's digest.

        Raises:
            ConfigError: a key is missing, a maximum is not a finite number above 0, or a list is not
                the one that was written for its layer and field.
        """
        header, found = read_header("static_scales", data)
        layers = tuple(_maxima(header.model_digest, index, layer) for index, layer in enumerate(found))
        return cls(
            model_digest=header.model_digest,
            text_digest=header.text_digest,
            tokens=header.tokens,
            layers=layers,
        )


def _maxima(model_digest: str, index: int, data: object) -> HeadMaxima:
    where = f"static_scales.layers[{index}]"
    if not isinstance(data, dict) or set(data) != {*PARTS, "digests"}:
        raise ConfigError(f"{where} must hold {', '.join(PARTS)} and digests; {AGAIN}")
    heads = {part: check_numbers(f"{where}.{part}", data[part], positive=True) for part in PARTS}
    for part in PARTS:
        check_shape(f"{where}.{part}", heads[part], len(heads["k"]), "heads")
    digests = data["digests"] if isinstance(data["digests"], dict) else {}
    for part in PARTS:
        expected = field_digest(model_digest, index, part, list(heads[part]))
        check_digest(f"{where}.{part}", digests.get(part), expected)
    return HeadMaxima(**heads)
