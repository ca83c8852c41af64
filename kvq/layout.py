"""Block layout: the offsets of every layer's codes and scales inside a block.

One block of a layer group contains, for each layer of the group, K codes [kv_heads, block_size, row_bytes], V
codes, K scales, V scales ([kv_heads, channel_bytes] if per channel) and, with block means, K means and V
means [kv_heads, mean_bytes]; each region is aligned to 16 bytes. Copies, moves and digests operate on `runs`.

With a staged recipe, the same layers form additional groups, in bf16: RECENT, a sliding window over the most
recent tokens, from which blocks are sealed, and SINKS, the first blocks of every sequence.

A model's recurrent states form the last group, STATES. One block in it contains the states of all layers
after one token; each tensor is stored in the form in which the model computes.
"""

from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TypedDict

from kvq.errors import ConfigError
from kvq.formats import BLOCK_SIZE as BLOCK_SIZE
from kvq.formats import ExactTokens, KVFormat, KVRecipe, LayerFormats
from kvq.formats.spec import tokens_of
from kvq.geometry import LayerGeometry, LayerGroup, ModelGeometry, StateTensor

VERSION = 1  # of the byte order inside a block; blocks of another version must not be read
ALIGNMENT = 16  # bytes
MAX_BLOCK_SIZE = 4096
STAGED_FORMAT = "bf16"  # of tokens that stay unquantized
UNPADDED_TOKENS = 16  # in a block, or a multiple of this number: then no region is padded


class BlockOrder(Enum):  # D52: layer-major by default; block-major copies and moves faster
    """Order in which a pool stores the blocks of several layers."""

    LAYER_MAJOR = "layer-major"  # [layer, block, bytes]
    BLOCK_MAJOR = "block-major"  # [block, layer, bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """Rows of one kind within one layer's part of a block."""

    offset: int  # bytes from the start of the layer's part
    row_bytes: int  # bytes of one token row
    nbytes: int  # without the padding that follows


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerLayout:
    """Layout of one layer's part of a block."""

    geometry: LayerGeometry
    formats: LayerFormats
    k_codes: Region
    v_codes: Region
    k_scales: Region
    v_scales: Region
    k_means: Region  # a "row" per block; empty unless block means are subtracted
    v_means: Region
    nbytes: int  # padding included

    @property
    def regions(self) -> tuple[Region, ...]:
        """All regions, in the order of their offsets."""
        return self.k_codes, self.v_codes, self.k_scales, self.v_scales, self.k_means, self.v_means


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """Contiguous bytes in a pool."""

    offset: int
    nbytes: int


class Holding(TypedDict, total=False):
    """Rules for sequences' blocks: options of `BlockManager`. Lists have one entry per layer group."""

    windows: list[int | None]  # tokens; None, the default: full attention
    limits: list[int | None]  # number of first tokens with blocks, a multiple of the block size; None: all
    block_bytes: list[int]  # bytes of one block, for receipts; by default 1
    lag: int  # tokens to commit after a block before it is indexed; by default 0
    rungs: dict[int, list[int]]  # by layer group, bytes of a block in each colder format of a ladder
    state_group: int | None  # group whose blocks store recurrent states; its window is 2
    snapshot_every: int  # tokens between states that the index keeps, besides those at the ends of prompts


class Role(Enum):
    """Content of a layer group's blocks."""

    SEALED = "sealed"  # tokens as the recipe stores them
    RECENT = "recent"  # the most recent tokens, unquantized
    SINKS = "sinks"  # the first tokens, unquantized
    STATES = "states"  # no tokens, but the recurrent states after a token


@dataclass(frozen=True, kw_only=True, slots=True)
class _StateRegion:
    """One tensor of a layer's recurrent state within a block."""

    number: int  # of the layer in the model's code
    tensor: StateTensor
    offset: int  # bytes from the start of the block

    @property
    def end(self) -> int:
        """Offset of the end of the region, including padding, in bytes from the start of the block."""
        return self.offset + -(-self.tensor.nbytes(_COMPUTE_BYTES) // ALIGNMENT) * ALIGNMENT


_COMPUTE_BYTES = 2  # of states in the model's compute dtype, until that is known
_STATE_WINDOW = 2  # tokens: each needs the states after the token before it


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLayout:
    """Layout of one layer group's blocks, and of a pool of such blocks."""

    group: LayerGroup
    block_size: int  # tokens
    order: BlockOrder
    layers: tuple[LayerLayout, ...]
    role: Role = Role.SEALED
    limit: int | None = None  # number of first tokens of a sequence with blocks (SINKS); None: all
    states: tuple[_StateRegion, ...] = ()  # in place of layers

    @property
    def holds_all(self) -> bool:
        """True if a sequence keeps blocks in this group for all its tokens."""
        return self.group.window is None and self.limit is None

    @property
    def is_staging(self) -> bool:
        """True if the blocks store unquantized tokens, either recent tokens or sinks."""
        return self.role in (Role.RECENT, Role.SINKS)

    @property
    def name(self) -> str:
        """Name of the group by content: `full`, `sliding-128`, `recent-160`, `sinks-32` or `states`."""
        if self.role is Role.STATES:
            return "states"
        held = {Role.RECENT: self.group.window, Role.SINKS: self.limit}.get(self.role)
        return self.group.name if held is None else f"{self.role.value}-{held}"

    @property
    def block_bytes(self) -> int:
        """Size of one block in bytes, including all layers of the group."""
        return sum(layer.nbytes for layer in self.layers) + max((x.end for x in self.states), default=0)

    def pool_bytes(self, num_blocks: int) -> int:
        """Return the exact size of a pool in bytes, as allocated."""
        return num_blocks * self.block_bytes

    def sequence_bytes(self, tokens: int) -> int:
        """Return the total size in bytes of a sequence's blocks in this group, for `tokens` tokens."""
        first = 0 if self.group.window is None else max(0, tokens - self.group.window + 1)
        held = -(-min(tokens, self.limit or tokens) // self.block_size) - first // self.block_size
        return held * self.block_bytes

    def block_stride(self, position: int) -> int:
        """Return the number of bytes between consecutive blocks for the layer at `position` in the group."""
        if self.order is BlockOrder.BLOCK_MAJOR:
            return self.block_bytes
        return self.layers[position].nbytes

    def base(self, position: int, num_blocks: int) -> int:
        """Return the byte offset within the pool of block 0's data for the layer at `position`."""
        before = sum(layer.nbytes for layer in self.layers[:position])
        return before if self.order is BlockOrder.BLOCK_MAJOR else before * num_blocks

    def runs(self, block: int, num_blocks: int) -> tuple[_Run, ...]:
        """Return the byte runs that make up one block: a single run, or one per layer."""
        if self.order is BlockOrder.BLOCK_MAJOR:
            return (_Run(offset=block * self.block_bytes, nbytes=self.block_bytes),)
        return tuple(
            _Run(offset=self.base(i, num_blocks) + block * layer.nbytes, nbytes=layer.nbytes)
            for i, layer in enumerate(self.layers)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class KVLayout:
    """Layouts of all layer groups of a model under one recipe."""

    geometry: ModelGeometry
    recipe: KVRecipe
    groups: tuple[GroupLayout, ...]  # SEALED, then RECENT, then SINKS, each in the same order; then STATES
    block_size: int  # tokens

    @property
    def sealed(self) -> tuple[GroupLayout, ...]:
        """Groups whose blocks are stored in the recipe's formats, one for each kind of layer."""
        return tuple(group for group in self.groups if group.role is Role.SEALED)

    @property
    def attended(self) -> tuple[GroupLayout, ...]:
        """Groups whose blocks store K and V."""
        return tuple(group for group in self.groups if group.role is not Role.STATES)

    @property
    def is_staged(self) -> bool:
        """True if tokens wait in a staging area before they are quantized."""
        return any(group.role is Role.RECENT for group in self.groups)

    @property
    def states(self) -> GroupLayout | None:
        """Group of the recurrent states, or None if the model has none."""
        return self.groups[-1] if self.groups[-1].role is Role.STATES else None

    def blocks_for(self, sequences: int, tokens: int) -> list[int]:
        """Return blocks per layer group for `sequences` sequences of `tokens` tokens, ignoring windows."""
        each = -(-tokens // self.block_size)
        return [sequences * (2 if group.role is Role.STATES else each) for group in self.groups]

    def staging_of(self, group: int) -> GroupLayout:
        """Return the group of a sealed group's most recent tokens; the recipe must be staged."""
        return self.groups[len(self.sealed) + group]

    @property
    def exact(self) -> ExactTokens:
        """Tokens that stay unquantized, with sinks rounded up to complete blocks."""
        sinks = -(-self.recipe.exact.sinks // self.block_size) * self.block_size
        return replace(self.recipe.exact, sinks=sinks)

    def written_from(self, group: int) -> int | None:
        """Return the first token that is ever written to a group's blocks, or None if there is none.

        Sealed blocks never contain tokens that are sinks; they contain no tokens at all if the window ends
        within the recent tokens.
        """
        own, exact = self.groups[group], self.exact
        if own.role is not Role.SEALED or not self.is_staged:
            return 0
        window = own.layers[0].geometry.window
        return exact.sinks if window is None or window > exact.recent else None

    @property
    def holding(self) -> Holding:
        """Options of the `BlockManager` for these groups."""
        return Holding(
            windows=[group.group.window for group in self.groups],
            limits=[group.limit for group in self.groups],
            block_bytes=[group.block_bytes for group in self.groups],
            lag=self.recipe.exact.recent if self.is_staged else 0,
            state_group=None if self.states is None else self.states.group.index,
        )

    @property
    def kv_bytes_per_token(self) -> float:
        """Pool bytes used by one more token over all layers once it is quantized, including padding."""
        return sum(group.block_bytes for group in self.sealed) / self.block_size

    def sequence_bytes(self, tokens: int) -> int:
        """Return the pool bytes for a sequence of `tokens` tokens, including tokens not yet quantized."""
        return sum(group.sequence_bytes(tokens) for group in self.groups)


def plan_layout(
    geometry: ModelGeometry,
    recipe: KVRecipe,
    *,
    block_size: int = BLOCK_SIZE,
    order: BlockOrder = BlockOrder.LAYER_MAJOR,
    staging: bool = True,
) -> KVLayout:
    """Lay out the blocks of a model under a recipe.

    `staging`: False if the caller keeps tokens until their block is full; see `WholeBlockStore`.

    Raises:
        ConfigError: the block size is out of range, or the recipe doesn't match the model's layers.
    """
    if not isinstance(order, BlockOrder):
        raise ConfigError(f"order must be a BlockOrder, got {order!r}; use BlockOrder({order!r})")
    if type(block_size) is not int or not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise ConfigError(
            f"block_size must be 1 to {MAX_BLOCK_SIZE} tokens, got {block_size}; {BLOCK_SIZE} is usual"
        )
    check_recipe_fits(geometry, recipe)
    block_size = tokens_of(recipe.own) or block_size
    groups = tuple(
        GroupLayout(
            group=group,
            block_size=block_size,
            order=order,
            layers=tuple(plan_layer(x, recipe.layers[x.index], block_size) for x in group.layers),
        )
        for group in geometry.groups()
    )
    if recipe.is_staged and staging:
        groups = tuple(_outlasting(group, recipe.exact.recent) for group in groups)
        groups += _staging(groups, recipe.exact)
    if geometry.states:
        groups += (_states(geometry, len(groups), block_size),)
    return KVLayout(geometry=geometry, recipe=recipe, groups=groups, block_size=block_size)


def _outlasting(group: GroupLayout, recent: int) -> GroupLayout:  # D73
    """Return a group with its window extended past the recent tokens if it ends within them. No token is ever
    sealed in its blocks, but prefixes include these blocks and are indexed only once recent tokens follow."""
    window = group.group.window
    if window is None or window > recent:
        return group
    return replace(group, group=replace(group.group, window=recent + group.block_size))


def _staging(groups: tuple[GroupLayout, ...], exact: ExactTokens) -> tuple[GroupLayout, ...]:
    """Return the groups of unquantized tokens; `kvq.cache.stores.staged` specifies which tokens these are."""
    size = groups[0].block_size
    recent = [_plain(group, len(groups) + i, window=exact.recent + size) for i, group in enumerate(groups)]
    if not exact.sinks:
        return tuple(recent)
    limit = -(-exact.sinks // size) * size
    first = [_plain(group, 2 * len(groups) + i, limit=limit) for i, group in enumerate(groups)]
    return (*recent, *first)


def _states(geometry: ModelGeometry, index: int, block_size: int) -> GroupLayout:
    """Return the group of the recurrent states; its blocks are contiguous regardless of the others' order."""
    regions: list[_StateRegion] = []
    for state in geometry.states:
        for tensor in state.tensors:
            offset = regions[-1].end if regions else 0
            regions.append(_StateRegion(number=state.number, tensor=tensor, offset=offset))
    return GroupLayout(
        group=LayerGroup(index=index, window=_STATE_WINDOW, layers=()),
        block_size=block_size,
        order=BlockOrder.BLOCK_MAJOR,
        layers=(),
        role=Role.STATES,
        states=tuple(regions),
    )


def _plain(
    group: GroupLayout, index: int, *, window: int | None = None, limit: int | None = None
) -> GroupLayout:
    """Return a group with the same layers, in bf16."""
    layers = tuple(
        plan_layer(
            x.geometry,
            LayerFormats.plain(STAGED_FORMAT, x.geometry.k_head_dim, x.geometry.v_head_dim),
            group.block_size,
        )
        for x in group.layers
    )
    return replace(
        group,
        group=replace(group.group, index=index, window=window),
        layers=layers,
        role=Role.SINKS if window is None else Role.RECENT,
        limit=limit,
    )


def named_recipe(
    kv: str | Path | KVRecipe, geometry: ModelGeometry, *, whole_blocks: bool = True
) -> KVRecipe:
    """Return the recipe specified by `kv` for a model, as `KVRecipe.named` does.

    `whole_blocks`: whether tokens may wait until their block is full. Latents never wait, because a long
    prefill expands the stored latent of every token into heads.
    """
    waits = whole_blocks and not any(layer.is_latent for layer in geometry.layers)
    return KVRecipe.named(kv, geometry.head_dims, whole_blocks=waits)


def check_recipe_fits(geometry: ModelGeometry, recipe: KVRecipe) -> None:
    """Raise ConfigError unless the recipe matches the model's layers and head dimensions."""
    named = [(layer.k_head_dim, layer.v_head_dim) for layer in recipe.layers]
    if named != geometry.head_dims:
        raise ConfigError(
            f"the recipe is for {len(named)} layers with (K, V) head dimensions {sorted(set(named))}, "
            f"the model has {len(geometry.layers)} with {sorted(set(geometry.head_dims))}; "
            f"make one for this model with `kvq calibrate`"
        )


def _scales(fmt: KVFormat, dim: int, block_size: int) -> tuple[int, int]:
    """Return the number of scale rows per block and KV head, and the bytes per row."""
    return (1, fmt.channel_bytes(dim)) if fmt.is_per_channel else (block_size, fmt.scale_bytes(dim))


def plan_layer(geometry: LayerGeometry, formats: LayerFormats, block_size: int) -> LayerLayout:
    """Lay out one layer's part of a block with `block_size` tokens."""
    k_dim, v_dim = geometry.k_head_dim, geometry.v_head_dim
    rows = {
        "k_codes": (block_size, formats.k.code_bytes(k_dim)),
        "v_codes": (block_size, formats.v.code_bytes(v_dim)),
        "k_scales": _scales(formats.k, k_dim, block_size),
        "v_scales": _scales(formats.v, v_dim, block_size),
        "k_means": (1, formats.k.mean_bytes(k_dim)),
        "v_means": (1, formats.v.mean_bytes(v_dim)),
    }
    regions, offset = {}, 0
    for name, (count, row) in rows.items():
        nbytes = geometry.kv_heads * count * row
        regions[name] = Region(offset=offset, row_bytes=row, nbytes=nbytes)
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return LayerLayout(geometry=geometry, formats=formats, nbytes=offset, **regions)
