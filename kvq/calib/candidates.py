"""Candidate formats of `kvq tune`, for K and V of every layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from kvq.errors import ConfigError, nearest
from kvq.formats.codes import CODES, Code
from kvq.formats.names import parse_format, parse_key_format
from kvq.formats.recipe import KVRecipe, LayerFormats
from kvq.formats.spec import Grouped, KVFormat, Own, legal_group_sizes
from kvq.geometry import ModelGeometry
from kvq.layout import BLOCK_SIZE
from kvq.models.loading.prepared import PreparedModel

ALL_CODES = tuple(code for code in CODES.values() if code is Code.INT8 or code.is_grouped)  # widest first
_LARGEST_GROUP = 64  # elements


@dataclass(frozen=True, kw_only=True, slots=True)
class Half:
    """K or V of one layer."""

    layer: int
    part: str  # "k" or "v"
    kv_heads: int
    head_dim: int
    block_size: int = BLOCK_SIZE  # tokens

    def nbytes(self, fmt: KVFormat) -> Fraction:
        """Return the bytes per token, including per-block data but not block padding."""
        return self.kv_heads * self.head_dim * fmt.bits_per_element(self.head_dim, self.block_size) / 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """Cost of storing one half in one format, with all other halves unquantized."""

    half: Half
    fmt: KVFormat
    kl: float  # nats per token
    is_estimated: bool = False

    @property
    def nbytes(self) -> Fraction:
        """Bytes per token."""
        return self.half.nbytes(self.fmt)


def halves(geometry: ModelGeometry, block_size: int = BLOCK_SIZE) -> list[Half]:
    """Return K and V of every layer, in layer order."""
    return [
        Half(layer=layer.index, part=part, kv_heads=layer.kv_heads, head_dim=dim, block_size=block_size)
        for layer in geometry.layers
        for part, dim in (("k", layer.k_head_dim), ("v", layer.v_head_dim))
    ]


def candidates(model: PreparedModel, codes: Sequence[Code]) -> dict[Half, list[KVFormat]]:
    """Return the candidate formats of each half: the results of `formats_of` for every code.

    Raises:
        UnfitFormat: a code doesn't fit the head dimension of some half.
    """
    whole = model.cache == "kvq"
    units = halves(model.geometry, model.block_size)
    return {
        half: [fmt for code in codes for fmt in formats_of(half, code, whole_blocks=whole)] for half in units
    }


def formats_of(half: Half, code: Code, *, whole_blocks: bool = True) -> list[KVFormat]:  # D28
    """Return the formats of a code to try for a half, smallest first.

    K gets per-channel scales if whole blocks are quantized and its head dimension fits. V, and otherwise K,
    is quantized per token: rotated, with 8-bit scales, in groups from 64 elements down to the bare name's
    group size.
    """
    parse = parse_key_format if whole_blocks and half.part == "k" else parse_format
    bare = parse(code.name, half.head_dim)
    if not isinstance(bare.scale, Grouped):
        return [bare]
    least = bare.scale.group_size
    sizes = [n for n in legal_group_sizes(half.head_dim) if least <= n <= max(least, _LARGEST_GROUP)]
    return [replace(bare, scale=Grouped(n, is_narrow=True)) for n in reversed(sizes)]


def recipe_of(
    geometry: ModelGeometry, chosen: Mapping[tuple[int, str], KVFormat], rest: KVFormat, label: str = ""
) -> KVRecipe:
    """Return a recipe with the formats `chosen`, keyed by (layer, part), and the format `rest` elsewhere."""
    layers = (
        LayerFormats(
            k=chosen.get((layer.index, "k"), rest),
            v=chosen.get((layer.index, "v"), rest),
            k_head_dim=layer.k_head_dim,
            v_head_dim=layer.v_head_dim,
        )
        for layer in geometry.layers
    )
    return KVRecipe(layers=tuple(layers), label=label)


def format_in(recipe: KVRecipe, half: Half) -> KVFormat:
    """Return the format in which a recipe stores a half."""
    fmt: KVFormat = getattr(recipe.layers[half.layer], half.part)
    return fmt


def codes_of(names: Sequence[str]) -> tuple[Code, ...]:
    """Return the codes named by `--formats int8,int4,int3`.

    Raises:
        ConfigError: a name is not one of the codes.
    """
    known = {code.name: code for code in ALL_CODES}
    for name in names:
        if name in Own.registered:
            raise ConfigError(f"{name} is a registered format, of which `kvq tune` has no candidates")
        if name not in known:
            hint = nearest(name, known) or ";"
            raise ConfigError(
                f"--formats takes {', '.join(known)}, got {name!r}{hint} separate them by commas"
            )
    return tuple(known[name] for name in dict.fromkeys(names))
