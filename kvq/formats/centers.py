"""Centers: what K and V are on average, per channel, which grouped formats need not store.

K - c changes every score of a query by the same number, which softmax does not see; V - c takes c from
every output, which is added back. So a constant offset, such as a key bias that outlives RoPE, costs
no bits. Source: Zhang et al. 2024, SageAttention, section 4.2 (smoothing K), there per sequence.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvq.errors import ConfigError
from kvq.formats.calibrated import AGAIN, Calibrated, check_model, check_numbers, check_shape

HeadCenters = tuple[tuple[float, ...], ...]  # [kv_heads][head_dim]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCenters:
    """The centers of one layer; None leaves K or V as it is."""

    k: HeadCenters | None = None
    v: HeadCenters | None = None

    @classmethod
    def read(cls, where: str, data: dict[str, Any]) -> Self:
        """From lists of one list per KV head, or null."""
        return cls(**{part: _rows(f"{where}.{part}", data[part]) for part in ("k", "v")})


@dataclass(frozen=True, kw_only=True, slots=True)
class Centers(Calibrated[LayerCenters]):
    """Calibrated means of K (after RoPE) and V of every layer of one model."""

    name: ClassVar = "centers"
    kind: ClassVar = LayerCenters

    def check(self, *, model_digest: str, kv_heads: list[int]) -> None:
        """Raise ConfigError unless these centers were made for that model."""
        check_model("centers", self.model_digest, model_digest)
        check_shape("centers.layers", self.layers, len(kv_heads), "layers")
        for index, (layer, heads) in enumerate(zip(self.layers, kv_heads, strict=True)):
            for part, rows in (("k", layer.k), ("v", layer.v)):
                if rows is not None:
                    check_shape(f"centers.layers[{index}].{part}", rows, heads, "KV heads")


def _rows(where: str, data: object) -> HeadCenters | None:
    if data is None:
        return None
    if not isinstance(data, list) or not data:
        raise ConfigError(f"{where} must be null or a list of one list per KV head; {AGAIN}")
    rows = tuple(check_numbers(f"{where}[{head}]", row, positive=False) for head, row in enumerate(data))
    for head, row in enumerate(rows):
        check_shape(f"{where}[{head}]", row, len(rows[0]), "channels")
    return rows
