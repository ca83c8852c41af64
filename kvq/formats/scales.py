"""Static scales: what calibration saw of K and V, per layer and KV head."""

from dataclasses import dataclass

from kvq.errors import ConfigError
from kvq.formats.spec import Code, KVFormat

LARGEST_CODE = {Code.FP8: 448.0, Code.INT8: 127.0}
_SMALLEST_SCALE = 2.0**-126  # the smallest normal fp32 number: a scale never rounds to zero
_LARGEST_MAXIMUM = float.fromhex("0x1.fffffep127")  # the largest fp32 number


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadMaxima:
    """Largest absolute value per KV head of one layer, before and after the Hadamard rotation."""

    k: tuple[float, ...]
    v: tuple[float, ...]
    k_rotated: tuple[float, ...]
    v_rotated: tuple[float, ...]

    def scales(self, part: str, fmt: KVFormat) -> tuple[float, ...]:
        """Static fp32 scales of `part` ("k" or "v") for a per-head format, one per KV head.

        scale = max(amax / 448, 2**-126) for FP8, amax / 127 for INT8; a head that was always
        zero gets 1.
        """
        maxima: tuple[float, ...] = getattr(self, part + ("_rotated" if fmt.rotated else ""))
        largest = LARGEST_CODE[fmt.code]
        return tuple(max(a / largest, _SMALLEST_SCALE) if a > 0 else 1.0 for a in maxima)


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticScales:
    """Calibrated maxima of every layer of one model."""

    model_digest: str  # the weights they were observed on
    text_digest: str  # SHA-256 of the calibration text
    tokens: int
    layers: tuple[HeadMaxima, ...]

    def check(self, *, model_digest: str, kv_heads: list[int]) -> None:
        """Raise ConfigError unless these scales were made for that model."""
        if self.model_digest != model_digest:
            raise ConfigError(
                f"these static scales belong to another model (digest {self.model_digest[:12]}, "
                f"this model is {model_digest[:12]}); run `kvq calibrate MODEL --out kvq.json`"
            )
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
            "layers": [
                {p: list(getattr(layer, p)) for p in ("k", "v", "k_rotated", "v_rotated")}
                for layer in self.layers
            ],
        }

    @classmethod
    def from_json(cls, data: object) -> "StaticScales":
        """Read `to_json`'s object, checking every number.

        Raises:
            ConfigError: a key is missing or a maximum is not a finite number of at least 0.
        """
        if not isinstance(data, dict) or set(data) != {"model_digest", "text_digest", "tokens", "layers"}:
            raise ConfigError("static_scales must hold model_digest, text_digest, tokens and layers")
        if not isinstance(data["layers"], list) or not isinstance(data["tokens"], int) or data["tokens"] < 0:
            raise ConfigError("static_scales.layers must be a list and static_scales.tokens a number")
        return cls(
            model_digest=str(data["model_digest"]),
            text_digest=str(data["text_digest"]),
            tokens=data["tokens"],
            layers=tuple(_maxima(i, layer) for i, layer in enumerate(data["layers"])),
        )


def _maxima(index: int, data: object) -> HeadMaxima:
    parts = ("k", "v", "k_rotated", "v_rotated")
    if not isinstance(data, dict) or set(data) != set(parts):
        raise ConfigError(f"static_scales.layers[{index}] must hold {', '.join(parts)}")
    for part in parts:
        values = data[part]
        if not isinstance(values, list) or not all(
            isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x <= _LARGEST_MAXIMUM
            for x in values
        ):
            raise ConfigError(
                f"static_scales.layers[{index}].{part} must be a list of finite numbers of at least 0; "
                f"run `kvq calibrate MODEL --out kvq.json` again"
            )
    heads = {part: tuple(float(x) for x in data[part]) for part in parts}
    if len({len(values) for values in heads.values()}) != 1:
        raise ConfigError(f"static_scales.layers[{index}] names different numbers of heads")
    return HeadMaxima(**heads)
