"""Formats that `kvq tune` chooses from, and how one half of a layer can be stored."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvq.calib.observe import some_centers
from kvq.errors import ConfigError, nearest
from kvq.formats import (
    Centers,
    Code,
    Grouped,
    KVFormat,
    KVRecipe,
    LayerFormats,
    legal_group_sizes,
)
from kvq.geometry import ModelGeometry
from kvq.kernels import Device, KernelSpec, select

PARTS = ("k", "v")
_LEAST_GROUP, _LARGEST_GROUP = 16, 128  # elements


@dataclass(frozen=True, kw_only=True, slots=True)
class Half:
    """K or V of one layer."""

    layer: int
    part: str  # "k" or "v"
    kv_heads: int
    head_dim: int

    def nbytes(self, fmt: KVFormat) -> int:
        """Bytes per token, scales included, block padding not."""
        return self.kv_heads * (fmt.code_bytes(self.head_dim) + fmt.scale_bytes(self.head_dim))


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """How a half is stored."""

    fmt: KVFormat
    is_centered: bool = False
    clip: float = 1.0


def halves(geometry: ModelGeometry) -> list[Half]:
    """K and V of every layer, in the order of layers."""
    return [
        Half(layer=layer.index, part=part, kv_heads=layer.kv_heads, head_dim=dim)
        for layer in geometry.layers
        for part, dim in (("k", layer.k_head_dim), ("v", layer.v_head_dim))
    ]


def grouped_formats(head_dim: int, code: Code, *, rotated: bool) -> list[KVFormat]:
    """The grouped formats of one code that a head dimension allows, in groups of 16 to 128, largest first."""
    legal = legal_group_sizes(head_dim)
    sizes = [n for n in legal if _LEAST_GROUP <= n <= _LARGEST_GROUP] or legal[-1:]
    return [KVFormat(code=code, scale=Grouped(n), rotated=rotated) for n in reversed(sizes)]


def recipe_of(
    geometry: ModelGeometry,
    stored: dict[tuple[int, str], Stored],
    rest: KVFormat,
    centers: Centers,
    label: str = "",
) -> KVRecipe:
    """A recipe of some halves, (layer, part) -> how it is stored; all others in format `rest`."""
    layers, centered = [], []
    for layer in geometry.layers:
        k, v = (stored.get((layer.index, part), Stored(fmt=rest)) for part in PARTS)
        centered.append((k.is_centered, v.is_centered))
        layers.append(
            LayerFormats(
                k=k.fmt,
                v=v.fmt,
                k_head_dim=layer.k_head_dim,
                v_head_dim=layer.v_head_dim,
                k_clip=k.clip,
                v_clip=v.clip,
            )
        )
    kept = some_centers(centers, centered)
    return KVRecipe(
        layers=tuple(layers),
        centers=kept if any(layer.k or layer.v for layer in kept.layers) else None,
        model_digest=centers.model_digest,
        label=label,
    )


def stored_in(recipe: KVRecipe, half: Half) -> Stored:
    """How a recipe stores a half."""
    layer = recipe.layers[half.layer]
    fmt, clip = (layer.k, layer.k_clip) if half.part == "k" else (layer.v, layer.v_clip)
    center = None if recipe.centers is None else getattr(recipe.centers.layers[half.layer], half.part)
    return Stored(fmt=fmt, is_centered=center is not None, clip=clip)


def has_fast_kernel(geometry: ModelGeometry, half: Half, fmt: KVFormat, device: torch.device) -> bool:
    """True if something faster than the reference attends from rows of that format here."""
    layer = geometry.layers[half.layer]
    formats = LayerFormats(k=fmt, v=fmt, k_head_dim=half.head_dim, v_head_dim=half.head_dim)
    spec = KernelSpec(formats=formats, q_heads=geometry.q_heads, kv_heads=layer.kv_heads, block_size=32)
    return select("attend", spec, Device.of(device)).backend != "reference"


def codes_of(names: Sequence[str]) -> tuple[Code, ...]:
    """The codes behind `--formats int8,int4,int2`.

    Raises:
        ConfigError: another name.
    """
    known = {code.name: code for code in (Code.INT8, Code.INT4, Code.INT2)}
    for name in names:
        if name not in known:
            hint = nearest(name, list(known)) or ";"
            raise ConfigError(
                f"--formats takes {', '.join(known)}, got {name!r}{hint} separate them by commas"
            )
    return tuple(known[name] for name in dict.fromkeys(names))
