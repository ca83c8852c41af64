"""KV recipe: the formats of every layer's K and V, and their calibration; stored as kvq.json."""

import hashlib
import json
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from kvq import fileio, strict_json
from kvq.errors import ConfigError, first_lines, unknown
from kvq.formats import names
from kvq.formats.calibrated import Centers, StaticScales, check_digest, check_model, check_shape, field_digest
from kvq.formats.codes import Code
from kvq.formats.names import parse_format
from kvq.formats.spec import BLOCK_SIZE, Grouped, KVFormat, Own

FORMAT_VERSION = 2
_LEAST_CLIP = 0.1  # D15: recipes may contain clips; the search tries none
_MOST_DIM = 65536  # elements of a row
_CLIPS = ("k_clip", "v_clip")
_EXACT = ("sinks", "recent")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFormats:
    """The formats of one layer's K and V rows, with their head dimensions in elements.

    `k_clip`, `v_clip`: the fraction of each group's range, around its middle, that 2-bit codes span; values
    outside it saturate. 1 spans the full range from minimum to maximum.
    """

    k: KVFormat
    v: KVFormat
    k_head_dim: int
    v_head_dim: int
    k_clip: float = 1.0
    v_clip: float = 1.0

    def __post_init__(self) -> None:
        self.k.check(self.k_head_dim)
        self.v.check(self.v_head_dim)
        for name, fmt, clip in (("k_clip", self.k, self.k_clip), ("v_clip", self.v, self.v_clip)):
            if clip == 1 / fmt.span:  # D412
                continue
            if not _LEAST_CLIP <= clip <= 1.0:
                raise ConfigError(f"{name} must be a number from {_LEAST_CLIP} to 1, got {clip!r:.40}")
            if clip != 1.0 and not (fmt.code is Code.INT2 and isinstance(fmt.scale, Grouped)):
                raise ConfigError(
                    f"{name}={clip} is for 2-bit formats in groups, got {fmt.name}; leave it out"
                )

    def unclipped(self) -> "LayerFormats":
        """Return formats whose codes span the full range of what they store."""
        return replace(self, k_clip=1 / self.k.span, v_clip=1 / self.v.span)

    @classmethod
    def plain(cls, name: str, k_dim: int, v_dim: int) -> "LayerFormats":
        """Return the formats of unquantized rows; `name` is the name of their dtype."""
        return cls(
            k=parse_format(name, k_dim), v=parse_format(name, v_dim), k_head_dim=k_dim, v_head_dim=v_dim
        )

    @property
    def need_whole_blocks(self) -> bool:
        """True if K or V is quantized in complete blocks, not token by token."""
        return self.k.needs_whole_blocks or self.v.needs_whole_blocks

    @property
    def is_static(self) -> bool:
        """True if K or V needs calibrated scales."""
        return self.k.is_static or self.v.is_static


@dataclass(frozen=True, kw_only=True, slots=True)
class KVRecipe:
    """Formats of every layer, with any calibrated numbers.

    `centers` are subtracted from the rows of grouped formats before storage.
    """

    layers: tuple[LayerFormats, ...]
    static_scales: StaticScales | None = None
    centers: Centers | None = None
    exact: names.ExactTokens = names.NOTHING_EXACT
    model_digest: str = ""  # of the weights that the recipe was made for; empty if it fits any model
    measured_on: str = ""  # what it was searched and measured on, for readers of the file
    label: str = ""  # the user's input, for tables

    def __post_init__(self) -> None:
        if self.centers is None:
            return
        check_shape("centers.layers", self.centers.layers, len(self.layers), "layers")
        for index, (layer, centers) in enumerate(zip(self.layers, self.centers.layers, strict=True)):
            for part, fmt, dim, rows in (
                ("k", layer.k, layer.k_head_dim, centers.k),
                ("v", layer.v, layer.v_head_dim, centers.v),
            ):
                if rows is None:
                    continue
                where = f"centers.layers[{index}].{part}"
                check_shape(f"{where}[0]", rows[0], dim, "channels")
                if not isinstance(fmt.scale, Grouped):
                    raise ConfigError(
                        f"{where} belongs to {fmt.name}; centers are for formats in groups, such as int4"
                    )

    @classmethod  # D5
    def uniform(cls, kv: str, head_dims: list[tuple[int, int]], *, whole_blocks: bool = False) -> "KVRecipe":
        """Make a recipe from one `--kv` name; `head_dims` is (k_head_dim, v_head_dim) per layer.

        `whole_blocks`: whether tokens may stay unquantized until their block is full; K then has per-channel
        scales if its name is bare.

        Raises:
            ConfigError: the name is unknown, or a head dimension does not fit the format.
        """
        formats, exact = names.split_exact(kv)
        pair, key_format = names.split_pair(formats), names.parse_key_format if whole_blocks else parse_format
        layers = tuple(
            LayerFormats(
                k=key_format(pair.k, k_dim), v=parse_format(pair.v, v_dim), k_head_dim=k_dim, v_head_dim=v_dim
            )
            for k_dim, v_dim in head_dims
        )
        return cls(layers=layers, exact=exact, label=kv.strip().lower())

    @classmethod
    def named(
        cls, kv: "str | Path | KVRecipe", head_dims: list[tuple[int, int]], *, whole_blocks: bool = False
    ) -> "KVRecipe":
        """Return the recipe specified by `kv`: a format or pair for all layers, a kvq.json, or a recipe.

        `whole_blocks`: as for `uniform`.

        Raises:
            ConfigError: `kv` is none of these, or its format is unknown or doesn't fit the layers.
        """
        if isinstance(kv, KVRecipe):
            return kv
        if not isinstance(kv, str | Path):
            raise ConfigError(f"kv must be a format name, a kvq.json or a KVRecipe, got {kv!r}")
        if str(kv).endswith(".json"):
            return replace(cls.load(kv), label=str(kv))  # distinguishes files with equal formats
        return cls.uniform(str(kv), head_dims, whole_blocks=whole_blocks)

    @property
    def name(self) -> str:
        """The label, or the pair of formats shared by all layers, or `mixed`."""
        if self.label:
            return self.label
        pairs = {(layer.k.name, layer.v.name) for layer in self.layers}
        if len(pairs) > 1:
            return f"mixed{self.exact}"
        k, v = next(iter(pairs))
        return (k if k == v else f"{k}/{v}") + str(self.exact)

    @property
    def is_static(self) -> bool:
        """True if any layer needs calibrated scales."""
        return any(layer.is_static for layer in self.layers)

    @property
    def is_staged(self) -> bool:
        """True if sinks, recent tokens or blocks not yet full are kept unquantized in a staging area."""
        wait = any(layer.need_whole_blocks for layer in self.layers)
        return wait or self.exact != names.NOTHING_EXACT

    @property
    def own(self) -> list[Own]:
        """The registered quantizers of all layers, if any."""
        return [fmt.own for layer in self.layers for fmt in (layer.k, layer.v) if fmt.own is not None]

    @property
    def is_quantized(self) -> bool:
        """True if any layer stores K or V in fewer than 16 bits."""
        return any(layer.k.is_quantized or layer.v.is_quantized for layer in self.layers)

    def bits_per_element(self, kv_heads: list[int], block_size: int = BLOCK_SIZE) -> Fraction:
        """Return the stored bits per K or V element over all layers, including scales and block means.

        Block padding and tokens in the staging area are not counted.
        """
        bits = elements = Fraction(0)
        for layer, heads in zip(self.layers, kv_heads, strict=True):
            for fmt, dim in ((layer.k, layer.k_head_dim), (layer.v, layer.v_head_dim)):
                bits += heads * dim * fmt.bits_per_element(dim, block_size)
                elements += heads * dim
        return bits / elements

    @property
    def is_bound(self) -> bool:
        """True if any part of the recipe is specific to one model."""
        return bool(self.model_digest) or self.static_scales is not None or self.centers is not None

    def check_belongs(self, *, model_digest: str, kv_heads: list[int]) -> None:
        """Raise ConfigError if any part of the recipe was made for a different model."""
        if self.model_digest:
            check_model("formats", self.model_digest, model_digest)
        for calibrated in (self.static_scales, self.centers):
            if calibrated is not None:
                calibrated.check(model_digest=model_digest, kv_heads=kv_heads)

    def require_scales(self) -> None:
        """Raise ConfigError if a layer needs static scales and the recipe has none."""
        if self.is_static and self.static_scales is None:
            raise ConfigError(
                f"{self.name} needs static scales and none were given; run "
                f"`kvq calibrate MODEL --out kvq.json` and pass `--scales kvq.json`, or use "
                f"--calibrate-on-load, or choose int8 or fp8, whose scales are found per token"
            )

    def check_unstaged(self, where: str) -> None:
        """Raise ConfigError as `check_stored` does, or if the recipe is staged and `where` has no staging."""
        self.check_stored(where)
        if self.is_staged:
            raise ConfigError(
                f"{self.name} keeps tokens unquantized until their block is full and old enough, which "
                f"{where} can't do; use formats without _mean, and no sinks or recent tokens"
            )

    def check_stored(self, where: str) -> None:
        """Raise ConfigError if there are registered quantizers: they lack stored bytes, which `where`
        needs."""
        for own in self.own:
            raise ConfigError(
                f"{own.name} is a registered format, which {where} can't take: its blocks hold what is read "
                f"back, in fp32; measure it with kvq.perplexity, kvq eval, kvq.load or KvqCache"
            )

    def with_scales(self, scales: StaticScales | None) -> "KVRecipe":
        """Return the recipe with these static scales."""
        return replace(self, static_scales=scales)

    def share(self, rank: int, processes: int) -> "KVRecipe":
        """Return the recipe with calibration results for only the KV heads of process `rank`."""
        return replace(
            self,
            static_scales=self.static_scales and self.static_scales.share(rank, processes),
            centers=self.centers and self.centers.share(rank, processes),
        )

    def digest(self) -> str:
        """Return the SHA-256, in hex, of everything that determines the interpretation of stored bytes."""
        data = replace(self, measured_on="").to_json()
        text = json.dumps(data, sort_keys=True) + "".join(own.nonce for own in self.own)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> dict[str, object]:
        """Return the JSON object that is stored in kvq.json."""
        return {
            "format_version": FORMAT_VERSION,
            "model_digest": self.model_digest or None,
            "layers": [self._layer_json(index, layer) for index, layer in enumerate(self.layers)],
            "static_scales": self.static_scales.to_json() if self.static_scales else None,
            "centers": self.centers.to_json() if self.centers else None,
            **{part: value for part in _EXACT if (value := getattr(self.exact, part))},
            **({"measured_on": self.measured_on} if self.measured_on else {}),
        }

    def _layer_json(self, index: int, layer: LayerFormats) -> dict[str, object]:
        data = {
            "k": layer.k.name,
            "v": layer.v.name,
            "k_head_dim": layer.k_head_dim,
            "v_head_dim": layer.v_head_dim,
            **{part: getattr(layer, part) for part in _CLIPS if getattr(layer, part) != 1},
        }
        return {**data, "digest": self._layer_digest(index)} if self.model_digest else data

    def _layer_digest(self, index: int) -> str:
        """Return the digest of a layer's storage; calibrated numbers, which have digests, are left out."""
        layer = self.layers[index]
        centers = None if self.centers is None else self.centers.layers[index]
        is_centered = [centers is not None and getattr(centers, part) is not None for part in ("k", "v")]
        clips = [float(getattr(layer, part)) for part in _CLIPS]
        values = [layer.k.name, layer.v.name, layer.k_head_dim, layer.v_head_dim, *clips]
        field = f"layer of {len(self.layers)}{self.exact}"
        return field_digest(self.model_digest, index, field, [*values, *is_centered])

    def save(self, path: str | Path) -> None:
        """Write kvq.json atomically, through a temporary file."""
        fileio.write_text(path, json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "KVRecipe":
        """Read a kvq.json file.

        Raises:
            ConfigError: the file is missing or not JSON, or its version or keys are not the expected ones.
        """
        try:
            return cls.from_json(strict_json.read(Path(path)))
        except OSError as error:
            raise ConfigError(f"can't read recipe {path}: {error.strerror}") from error
        except ConfigError as error:
            raise ConfigError(f"recipe {path}: {error}") from error
        except ValueError as error:
            raise ConfigError(f"recipe {path} is not JSON: {first_lines(error)}") from error

    @classmethod
    def load_scales(cls, path: str | Path) -> "KVRecipe":
        """Read only the static scales from a kvq.json file.

        Raises:
            ConfigError: as for `load`, or the file has no static scales.
        """
        recipe = replace(cls.load(path), label=str(path))
        if recipe.static_scales is None:
            raise ConfigError(
                f"{path} holds no static scales; make some: `kvq calibrate MODEL --out kvq.json`"
            )
        return recipe

    @classmethod
    def from_json(cls, data: object) -> "KVRecipe":
        """Read an object written by `to_json`.

        Raises:
            ConfigError: the version is unknown, keys are unknown or missing, or values don't fit.
        """
        if not isinstance(data, dict):
            raise ConfigError("expected a JSON object")
        version = data.get("format_version")
        if version != FORMAT_VERSION or type(version) is not int:
            raise ConfigError(
                f"format_version must be {FORMAT_VERSION}, got {version!r:.40}; "
                f"make the file again with `kvq calibrate`"
            )
        _check_keys(
            data,
            ("format_version", "layers", "static_scales"),
            optional=("centers", "model_digest", "measured_on", *_EXACT),
        )
        if not isinstance(data["layers"], list) or not data["layers"]:
            raise ConfigError("layers must be a list of at least one layer")
        layers = tuple(_layer(index, layer) for index, layer in enumerate(data["layers"]))
        scales = None if data["static_scales"] is None else StaticScales.from_json(data["static_scales"])
        if scales is not None:
            check_shape("static_scales.layers", scales.layers, len(layers), "layers")
        centers = None if data.get("centers") is None else Centers.from_json(data["centers"])
        model_digest = data.get("model_digest")
        if model_digest is not None and not isinstance(model_digest, str):
            raise ConfigError(f"model_digest must be a digest or null, got {model_digest!r:.40}")
        recipe = cls(
            layers=layers,
            static_scales=scales,
            centers=centers,
            exact=names.ExactTokens(**{part: data[part] for part in _EXACT if part in data}),
            model_digest=model_digest or "",
            measured_on=str(data.get("measured_on", "")),
        )
        for index, layer in enumerate(data["layers"]):
            if recipe.model_digest:
                check_digest(f"layers[{index}]", layer.get("digest"), recipe._layer_digest(index))
            elif "digest" in layer:
                raise ConfigError(
                    f"layers[{index}] has a digest, which is of a model_digest, and there is none; leave "
                    f"both out"
                )
        return recipe


def _layer(index: int, data: object) -> LayerFormats:
    try:
        return _formats(data)
    except ConfigError as error:
        raise type(error)(f"layers[{index}]: {error}") from error


def _formats(data: object) -> LayerFormats:
    if not isinstance(data, dict):
        raise ConfigError(f"a layer must be a JSON object, got {data!r:.40}")
    _check_keys(data, ("k", "v", "k_head_dim", "v_head_dim"), optional=(*_CLIPS, "digest"))
    dims = []
    for key in ("k_head_dim", "v_head_dim"):
        dim = data[key]
        if type(dim) is not int or not 1 <= dim <= _MOST_DIM:
            raise ConfigError(f"{key} must be 1 to {_MOST_DIM} elements, got {dim!r:.40}")
        dims.append(dim)
    clips = {key: data.get(key, 1.0) for key in _CLIPS}
    for key, clip in clips.items():
        if not isinstance(clip, int | float) or isinstance(clip, bool) or clip > 1:
            raise ConfigError(f"{key} must be a number from {_LEAST_CLIP} to 1, got {clip!r:.40}")
    return LayerFormats(
        k=parse_format(str(data["k"]), dims[0]),
        v=parse_format(str(data["v"]), dims[1]),
        k_head_dim=dims[0],
        v_head_dim=dims[1],
        **clips,
    )


def _check_keys(data: dict[str, object], required: tuple[str, ...], optional: tuple[str, ...]) -> None:
    allowed = (*required, *optional)
    for key in data:
        if key not in allowed:
            raise ConfigError(unknown("key", key, allowed))
    for key in required:
        if key not in data:
            raise ConfigError(f"missing key {key!r}")
