"""Centers: what K and V are on average, per channel, which grouped formats need not store.

K - c changes every score of a query by the same number, which softmax does not see; V - c takes c from
every output, which is added back. So a constant offset, such as a key bias that outlives RoPE, costs
no bits. Source: Zhang et al. 2024, SageAttention, section 4.2 (smoothing K), there per sequence.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

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

HeadCenters = tuple[tuple[float, ...], ...]  # [kv_heads][head_dim]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCenters:
    """The centers of one layer; None leaves K or V as it is."""

    k: HeadCenters | None = None
    v: HeadCenters | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Centers:
    """Calibrated means of K (after RoPE) and V of every layer of one model."""

    model_digest: str  # the weights they were observed on
    text_digest: str  # SHA-256 of the calibration text
    tokens: int
    layers: tuple[LayerCenters, ...]

    def check(self, *, model_digest: str, kv_heads: list[int]) -> None:
        """Raise ConfigError unless these centers were made for that model."""
        check_model("centers", self.model_digest, model_digest)
        check_shape("centers.layers", self.layers, len(kv_heads), "layers")
        for index, (layer, heads) in enumerate(zip(self.layers, kv_heads, strict=True)):
            for part, rows in (("k", layer.k), ("v", layer.v)):
                if rows is not None:
                    check_shape(f"centers.layers[{index}].{part}", rows, heads, "KV heads")

    def some(self, wanted: Iterable[tuple[bool, bool]]) -> "Centers":
        """Those of some halves: `wanted` says of every layer whether of K and whether of V."""
        layers = (
            LayerCenters(k=own.k if k else None, v=own.v if v else None)
            for own, (k, v) in zip(self.layers, wanted, strict=True)
        )
        return replace(self, layers=tuple(layers))

    def to_json(self) -> dict[str, object]:
        """The JSON object kept in kvq.json under `centers`."""
        layers = []
        for index, layer in enumerate(self.layers):
            rows = {"k": _lists(layer.k), "v": _lists(layer.v)}
            digests = {part: field_digest(self.model_digest, index, part, rows[part]) for part in rows}
            layers.append({**rows, "digests": digests})
        return {
            "model_digest": self.model_digest,
            "text_digest": self.text_digest,
            "tokens": self.tokens,
            "layers": layers,
        }

    @classmethod
    def from_json(cls, data: object) -> "Centers":
        """Read `to_json`'s object, checking every number and every list's digest.

        Raises:
            ConfigError: a key is missing, a number is not finite, or a list is not the one that was
                written for its layer and field.
        """
        header, found = read_header("centers", data)
        layers = tuple(_layer(header.model_digest, index, layer) for index, layer in enumerate(found))
        return cls(
            model_digest=header.model_digest,
            text_digest=header.text_digest,
            tokens=header.tokens,
            layers=layers,
        )


def _layer(model_digest: str, index: int, data: object) -> LayerCenters:
    where = f"centers.layers[{index}]"
    if not isinstance(data, dict) or set(data) != {"k", "v", "digests"}:
        raise ConfigError(f"{where} must hold k, v and digests; {AGAIN}")
    digests = data["digests"] if isinstance(data["digests"], dict) else {}
    k, v = (_rows(f"{where}.{part}", data[part]) for part in ("k", "v"))
    for part, rows in (("k", k), ("v", v)):
        expected = field_digest(model_digest, index, part, _lists(rows))
        check_digest(f"{where}.{part}", digests.get(part), expected)
    return LayerCenters(k=k, v=v)


def _rows(where: str, data: object) -> HeadCenters | None:
    if data is None:
        return None
    if not isinstance(data, list) or not data:
        raise ConfigError(f"{where} must be null or a list of one list per KV head; {AGAIN}")
    rows = tuple(check_numbers(f"{where}[{head}]", row, positive=False) for head, row in enumerate(data))
    for head, row in enumerate(rows):
        check_shape(f"{where}[{head}]", row, len(rows[0]), "channels")
    return rows


def _lists(rows: HeadCenters | None) -> list[list[float]] | None:
    return None if rows is None else [list(row) for row in rows]
