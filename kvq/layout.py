"""Block layout: where every layer's codes and scales lie inside a block.

One block of a layer group holds, for each of its layers, K codes [kv_heads, block_size, row_bytes],
V codes, K scales and V scales, each region aligned to 16 bytes. Codes and scales of a block live
and move together: copies, swaps and digests go over `runs`, so scales can't be left behind.
"""

from dataclasses import dataclass
from enum import Enum

from kvq.errors import ConfigError
from kvq.formats import KVRecipe, LayerFormats
from kvq.geometry import LayerGeometry, LayerGroup, ModelGeometry

VERSION = 1  # of the byte order inside a block; blocks of another version must not be read
ALIGNMENT = 16  # bytes
BLOCK_SIZE = 32  # tokens; wherever nobody chose another
MAX_BLOCK_SIZE = 4096
UNPADDED_TOKENS = 16  # of a block, or a multiple of them: then no region is padded


class BlockOrder(Enum):
    """How blocks of several layers follow each other in a pool."""

    LAYER_MAJOR = "layer-major"  # [layer, block, bytes]
    BLOCK_MAJOR = "block-major"  # [block, layer, bytes]


class Role(Enum):
    """What a layer group's blocks are for."""

    SEALED = "sealed"  # rows in the recipe's formats
    RECENT = "recent"  # staging: the youngest rows as they came
    SINKS = "sinks"  # staging: the first rows as they came


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """The rows of one kind inside one layer's part of a block."""

    offset: int  # bytes from the start of the layer's part
    row_bytes: int  # bytes of one token row
    nbytes: int  # without the padding that follows


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerLayout:
    """One layer's part of a block."""

    geometry: LayerGeometry
    formats: LayerFormats
    k_codes: Region
    v_codes: Region
    k_scales: Region
    v_scales: Region
    nbytes: int  # padding included


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Neighbouring bytes of a pool."""

    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLayout:
    """The layout of one layer group's blocks and of a pool of them."""

    group: LayerGroup
    block_size: int  # tokens
    order: BlockOrder
    layers: tuple[LayerLayout, ...]
    role: Role = Role.SEALED
    limit: int | None = None  # tokens of a sequence that have blocks, the first ones (SINKS); None: all

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of the group."""
        return sum(layer.nbytes for layer in self.layers)

    def pool_bytes(self, num_blocks: int) -> int:
        """Bytes of a pool; exactly what is allocated for it."""
        return num_blocks * self.block_bytes

    def block_stride(self, position: int) -> int:
        """Bytes from one block to the next for the layer at `position` in the group."""
        if self.order is BlockOrder.BLOCK_MAJOR:
            return self.block_bytes
        return self.layers[position].nbytes

    def base(self, position: int, num_blocks: int) -> int:
        """Byte offset in the pool of block 0's part for the layer at `position`."""
        before = sum(layer.nbytes for layer in self.layers[:position])
        return before if self.order is BlockOrder.BLOCK_MAJOR else before * num_blocks

    def runs(self, block: int, num_blocks: int) -> tuple[Run, ...]:
        """The runs of bytes that make up one block: one, or one per layer."""
        if self.order is BlockOrder.BLOCK_MAJOR:
            return (Run(offset=block * self.block_bytes, nbytes=self.block_bytes),)
        return tuple(
            Run(offset=self.base(i, num_blocks) + block * layer.nbytes, nbytes=layer.nbytes)
            for i, layer in enumerate(self.layers)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class KVLayout:
    """The layouts of all layer groups of a model under one recipe."""

    geometry: ModelGeometry
    recipe: KVRecipe
    groups: tuple[GroupLayout, ...]
    block_size: int  # tokens

    @property
    def kv_bytes_per_token(self) -> float:
        """Pool bytes that one token takes over all layers, padding included."""
        return sum(group.block_bytes for group in self.groups) / self.block_size


def plan_layout(
    geometry: ModelGeometry,
    recipe: KVRecipe,
    *,
    block_size: int = BLOCK_SIZE,
    order: BlockOrder = BlockOrder.LAYER_MAJOR,
) -> KVLayout:
    """Lay out the blocks of a model under a recipe.

    Raises:
        ConfigError: block size out of range, or a recipe made for other layers.
    """
    if not isinstance(order, BlockOrder):
        raise ConfigError(f"order must be a BlockOrder, got {order!r}; use BlockOrder({order!r})")
    if type(block_size) is not int or not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise ConfigError(
            f"block_size must be 1 to {MAX_BLOCK_SIZE} tokens, got {block_size}; {BLOCK_SIZE} is usual"
        )
    check_recipe_fits(geometry, recipe)
    groups = tuple(
        GroupLayout(
            group=group,
            block_size=block_size,
            order=order,
            layers=tuple(plan_layer(x, recipe.layers[x.index], block_size) for x in group.layers),
        )
        for group in geometry.groups()
    )
    return KVLayout(geometry=geometry, recipe=recipe, groups=groups, block_size=block_size)


def check_recipe_fits(geometry: ModelGeometry, recipe: KVRecipe) -> None:
    """Raise ConfigError unless the recipe names this model's layers and head dimensions."""
    named = [(layer.k_head_dim, layer.v_head_dim) for layer in recipe.layers]
    if named != geometry.head_dims:
        raise ConfigError(
            f"the recipe is for {len(named)} layers with (K, V) head dimensions {sorted(set(named))}, "
            f"the model has {len(geometry.layers)} with {sorted(set(geometry.head_dims))}; "
            f"make one for this model with `kvq calibrate`"
        )


def plan_layer(geometry: LayerGeometry, formats: LayerFormats, block_size: int) -> LayerLayout:
    """Lay out one layer's part of a block of `block_size` tokens."""
    row_bytes = {
        "k_codes": formats.k.code_bytes(geometry.k_head_dim),
        "v_codes": formats.v.code_bytes(geometry.v_head_dim),
        "k_scales": formats.k.scale_bytes(geometry.k_head_dim),
        "v_scales": formats.v.scale_bytes(geometry.v_head_dim),
    }
    regions = {}
    offset = 0
    for name, row in row_bytes.items():
        nbytes = geometry.kv_heads * block_size * row
        regions[name] = Region(offset=offset, row_bytes=row, nbytes=nbytes)
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return LayerLayout(geometry=geometry, formats=formats, nbytes=offset, **regions)
