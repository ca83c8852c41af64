"""Static scales: what calibration saw of K and V, per layer and KV head."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvq.errors import ConfigError
from kvq.formats.calibrated import Calibrated, check_model, check_numbers, check_shape
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

    @classmethod
    def read(cls, where: str, data: dict[str, Any]) -> Self:
        """From lists of one number above 0 per KV head."""
        heads = {part: check_numbers(f"{where}.{part}", data[part], positive=True) for part in PARTS}
        for part in PARTS:
            check_shape(f"{where}.{part}", heads[part], len(heads["k"]), "heads")
        return cls(**heads)


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticScales(Calibrated[HeadMaxima]):
    """Calibrated maxima of every layer of one model."""

    name: ClassVar = "static_scales"
    kind: ClassVar = HeadMaxima

    def check(self, *, model_digest: str, kv_heads: list[int]) -> None:
        """Raise ConfigError unless these scales were made for that model."""
        check_model("static scales", self.model_digest, model_digest)
        found = [len(layer.k) for layer in self.layers]
        if found != kv_heads:
            raise ConfigError(
                f"static scales hold {found} KV heads per layer, the model has {kv_heads}; "
                f"run `kvq calibrate MODEL --out kvq.json`"
            )
