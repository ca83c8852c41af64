"""Formats that `kvq tune` chooses from, and how one half of a layer can be stored."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch

from kvq.errors import ConfigError, nearest
from kvq.formats import (
    CODES,
    Centers,
    Code,
    ExactTokens,
    Grouped,
    KVFormat,
    KVRecipe,
    LayerFormats,
    legal_group_sizes,
    parse_format,
)
from kvq.geometry import ModelGeometry
from kvq.kernels import Device, KernelSpec, select
from kvq.layout import BLOCK_SIZE

ALL_CODES = tuple(code for code in CODES.values() if code is Code.INT8 or code.is_grouped)  # widest first
PARTS = ("k", "v")
_LARGEST_GROUP = 64  # elements
_LEAST_RECENT = ExactTokens(recent=1)  # what keeps the open block unquantized, and nothing else


@dataclass(frozen=True, kw_only=True, slots=True)
class Half:
    """K or V of one layer."""

    layer: int
    part: str  # "k" or "v"
    kv_heads: int
    head_dim: int
    block_size: int = BLOCK_SIZE  # tokens

    def nbytes(self, fmt: KVFormat) -> Fraction:
        """Bytes per token, scales and block means included, block padding not."""
        return self.kv_heads * self.head_dim * fmt.bits_per_element(self.head_dim, self.block_size) / 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """How a half is stored."""

    fmt: KVFormat
    is_centered: bool = False


def halves(geometry: ModelGeometry, block_size: int = BLOCK_SIZE) -> list[Half]:
    """K and V of every layer, in the order of layers."""
    return [
        Half(layer=layer.index, part=part, kv_heads=layer.kv_heads, head_dim=dim, block_size=block_size)
        for layer in geometry.layers
        for part, dim in (("k", layer.k_head_dim), ("v", layer.v_head_dim))
    ]


def grouped_formats(head_dim: int, code: Code, *, rotated: bool) -> list[KVFormat]:
    """The formats of a grouped code that are searched, smallest first: groups of 64 down to the bare name's.

    With scales of 8 bits, which at the same bytes beat those of 16 in groups twice as large.
    """
    bare = parse_format(code.name, head_dim)
    least = bare.scale.group_size if isinstance(bare.scale, Grouped) else head_dim
    sizes = [n for n in legal_group_sizes(head_dim) if least <= n <= max(least, _LARGEST_GROUP)]
    scales = (Grouped(n, is_narrow=True) for n in reversed(sizes))
    return [replace(bare, scale=scale, rotated=rotated) for scale in scales]


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
            )
        )
    kept = centers.some(centered)
    return KVRecipe(
        layers=tuple(layers),
        centers=kept if any(layer.k or layer.v for layer in kept.layers) else None,
        model_digest=centers.model_digest,
        label=label,
    )


def staged_alike(recipe: KVRecipe, exact: ExactTokens) -> KVRecipe:
    """A recipe with `exact` tokens, staged also where there are none of those, and no block means.

    Then one recent token keeps the open block unquantized, as a mean does. So trials differ in formats only.
    """
    recipe = replace(recipe, exact=exact)
    return recipe if recipe.is_staged else replace(recipe, exact=_LEAST_RECENT)


def stored_in(recipe: KVRecipe, half: Half) -> Stored:
    """How a recipe stores a half."""
    layer = recipe.layers[half.layer]
    center = None if recipe.centers is None else getattr(recipe.centers.layers[half.layer], half.part)
    return Stored(fmt=layer.k if half.part == "k" else layer.v, is_centered=center is not None)


def has_fast_kernel(
    geometry: ModelGeometry, half: Half, fmt: KVFormat, device: torch.device, *, is_staged: bool = False
) -> bool:
    """True if something faster than the reference attends from rows of that format here."""
    spec = KernelSpec(
        formats=LayerFormats(k=fmt, v=fmt, k_head_dim=half.head_dim, v_head_dim=half.head_dim),
        q_heads=geometry.q_heads,
        kv_heads=half.kv_heads,
        block_size=half.block_size,
        is_staged=is_staged,
    )
    return select("attend", spec, Device.of(device)).backend != "reference"


def codes_of(names: Sequence[str]) -> tuple[Code, ...]:
    """The codes behind `--formats int8,int4,int3`.

    Raises:
        ConfigError: another name.
    """
    known = {code.name: code for code in ALL_CODES}
    for name in names:
        if name not in known:
            hint = nearest(name, list(known)) or ";"
            raise ConfigError(
                f"--formats takes {', '.join(known)}, got {name!r}{hint} separate them by commas"
            )
    return tuple(known[name] for name in dict.fromkeys(names))
