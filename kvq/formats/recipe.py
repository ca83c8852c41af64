"""Recipes: which format K and V of every layer use, plus static scales; saved as kvq.json."""

import hashlib
import json
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from kvq import fileio
from kvq.errors import ConfigError, nearest
from kvq.formats.names import parse_format, split_pair
from kvq.formats.scales import StaticScales
from kvq.formats.spec import KVFormat

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFormats:
    """The formats of one layer's K and V rows, with their head dimensions in elements."""

    k: KVFormat
    v: KVFormat
    k_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        self.k.check(self.k_head_dim)
        self.v.check(self.v_head_dim)

    @property
    def is_static(self) -> bool:
        """True if K or V needs calibrated scales."""
        return self.k.is_static or self.v.is_static


@dataclass(frozen=True, kw_only=True, slots=True)
class KVRecipe:
    """The formats of every layer, and the static scales if any were given."""

    layers: tuple[LayerFormats, ...]
    static_scales: StaticScales | None = None
    label: str = ""  # what the user typed, for tables

    @classmethod
    def uniform(cls, kv: str, head_dims: list[tuple[int, int]]) -> "KVRecipe":
        """One `--kv` name for all layers; `head_dims` is (k_head_dim, v_head_dim) per layer.

        Raises:
            ConfigError: unknown name, or a format that a head dimension does not fit.
        """
        pair = split_pair(kv)
        layers = tuple(
            LayerFormats(
                k=parse_format(pair.k, k_dim),
                v=parse_format(pair.v, v_dim),
                k_head_dim=k_dim,
                v_head_dim=v_dim,
            )
            for k_dim, v_dim in head_dims
        )
        return cls(layers=layers, label=kv.strip().lower())

    @property
    def name(self) -> str:
        """The label, or the layers' common pair of formats, or `mixed`."""
        if self.label:
            return self.label
        pairs = {(layer.k.name, layer.v.name) for layer in self.layers}
        if len(pairs) > 1:
            return "mixed"
        k, v = next(iter(pairs))
        return k if k == v else f"{k}/{v}"

    @property
    def is_static(self) -> bool:
        """True if any layer needs calibrated scales."""
        return any(layer.is_static for layer in self.layers)

    @property
    def is_quantized(self) -> bool:
        """True if any layer stores K or V in fewer than 16 bits."""
        return any(layer.k.is_quantized or layer.v.is_quantized for layer in self.layers)

    def bits_per_element(self, kv_heads: list[int]) -> Fraction:
        """Stored bits per K or V element over all layers, scales included, block padding not."""
        bits = elements = Fraction(0)
        for layer, heads in zip(self.layers, kv_heads, strict=True):
            for fmt, dim in ((layer.k, layer.k_head_dim), (layer.v, layer.v_head_dim)):
                bits += heads * dim * fmt.bits_per_element(dim)
                elements += heads * dim
        return bits / elements

    def check_scales(self, *, model_digest: str, kv_heads: list[int]) -> None:
        """Raise ConfigError unless every static format has scales made for this model."""
        self.require_scales()
        if self.static_scales is not None:
            self.static_scales.check(model_digest=model_digest, kv_heads=kv_heads)

    def require_scales(self) -> None:
        """Raise ConfigError if a layer needs static scales and none were given."""
        if self.is_static and self.static_scales is None:
            raise ConfigError(
                f"{self.name} needs static scales and none were given; run "
                f"`kvq calibrate MODEL --out kvq.json` and pass `--scales kvq.json`, or use "
                f"--calibrate-on-load, or choose int8 or fp8, whose scales are found per token"
            )

    def with_scales(self, scales: StaticScales | None) -> "KVRecipe":
        """The same formats with those static scales."""
        return replace(self, static_scales=scales)

    def digest(self) -> str:
        """SHA-256 of everything that decides how bytes are read, in hex."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, object]:
        """The JSON object that kvq.json holds."""
        return {
            "format_version": FORMAT_VERSION,
            "layers": [
                {
                    "k": layer.k.name,
                    "v": layer.v.name,
                    "k_head_dim": layer.k_head_dim,
                    "v_head_dim": layer.v_head_dim,
                }
                for layer in self.layers
            ],
            "static_scales": self.static_scales.to_json() if self.static_scales else None,
        }

    def save(self, path: str | Path) -> None:
        """Write kvq.json, aside and renamed."""
        fileio.write_text(path, json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "KVRecipe":
        """Read kvq.json.

        Raises:
            ConfigError: missing, not JSON, of an unknown version, or with unknown or missing keys.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls.from_json(data)
        except OSError as error:
            raise ConfigError(f"can't read recipe {path}: {error.strerror}") from error
        except ConfigError as error:
            raise ConfigError(f"recipe {path}: {error}") from error
        except (ValueError, RecursionError) as error:  # of json: syntax, encoding, huge numbers
            raise ConfigError(f"recipe {path} is not JSON: {error}") from error

    @classmethod
    def from_json(cls, data: object) -> "KVRecipe":
        """Read `to_json`'s object.

        Raises:
            ConfigError: unknown version, unknown or missing keys, or values that don't fit.
        """
        if not isinstance(data, dict):
            raise ConfigError("expected a JSON object")
        version = data.get("format_version")
        if version != FORMAT_VERSION or isinstance(version, bool):
            raise ConfigError(
                f"format_version must be {FORMAT_VERSION}, got {data.get('format_version')!r}; "
                f"make the file again with `kvq calibrate`"
            )
        _check_keys(data, ("format_version", "layers", "static_scales"))
        if not isinstance(data["layers"], list) or not data["layers"]:
            raise ConfigError("layers must be a list of at least one layer")
        scales = data["static_scales"]
        return cls(
            layers=tuple(_layer(layer) for layer in data["layers"]),
            static_scales=None if scales is None else StaticScales.from_json(scales),
        )


def _layer(data: object) -> LayerFormats:
    if not isinstance(data, dict):
        raise ConfigError("every layer must be a JSON object")
    _check_keys(data, ("k", "v", "k_head_dim", "v_head_dim"))
    dims = []
    for key in ("k_head_dim", "v_head_dim"):
        dim = data[key]
        if not isinstance(dim, int) or isinstance(dim, bool) or not 1 <= dim <= 65536:
            raise ConfigError(f"{key} must be a number of elements, got {dim!r}")
        dims.append(dim)
    return LayerFormats(
        k=parse_format(str(data["k"]), dims[0]),
        v=parse_format(str(data["v"]), dims[1]),
        k_head_dim=dims[0],
        v_head_dim=dims[1],
    )


def _check_keys(data: dict[str, object], allowed: tuple[str, ...]) -> None:
    for key in data:
        if key not in allowed:
            raise ConfigError(
                f"unknown key {key!r}{nearest(key, list(allowed)) or ';'} allowed: {', '.join(allowed)}"
            )
    for key in allowed:
        if key not in data:
            raise ConfigError(f"missing key {key!r}")
