"""Cache backends: the interface that an engine requires of a KV cache, and the installed backends."""

import importlib
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from kvq.blockmgr.events import Order
from kvq.cache.stores.base import Attended, LayerBatch, LayerStore
from kvq.cache.stores.recurrent import StateSlots
from kvq.errors import ConfigError, first_lines, nearest
from kvq.kernels import AttentionOptions, SequenceBatch
from kvq.layout import KVLayout

ENTRY_POINTS = "kvq.cache_backends"
# Also named in pyproject.toml; listed here so that they are found without installed metadata, and so
# that no other package can take their names.
_BUILT_IN = {"kvq": "kvq.cache.kv_cache:KVCache", "dense": "kvq.cache.dense_backend:DenseCache"}  # D228


class CacheBackend(Protocol):
    """K and V blocks of all layers, by layer group. `kvq.cache.conformance` tests backends.

    `kvq.cache.blocks.BlockCache` is a base class with all operations on whole blocks.
    Instead of `stores`, a backend may have `group_of`, a dict from layer index to layer group, and the
    methods `write(layer, k, v, slots)` and `attend(layer, q, batch, options)`, which correspond to those
    of a `LayerStore`; `batch` is the batch of the layer's group.

    A slot is the position of one token in a layer group: block * block_size + offset.
    """

    @property
    def stores(self) -> Mapping[int, LayerStore]:
        """Stores that a model writes to and attends over, keyed by layer index. `grow` may replace them."""

    @property
    def states(self) -> StateSlots | None:
        """Recurrent states, or None if the backend stores none."""

    @property
    def num_blocks(self) -> list[int]:
        """Number of blocks per layer group."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated for all blocks on the device."""

    def copy(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, listed as (source, target) pairs, with the same result as one pair at a time."""

    def scrub(self, group: int, blocks: Sequence[int]) -> None:
        """Zero blocks."""

    def carry_out(self, orders: Sequence[Order]) -> None:
        """Carry out a block manager's orders, strictly one after another."""

    def read_block(self, group: int, block: int) -> Tensor:
        """Return a copy of a block's bytes on the host, uint8 [bytes of a block], layer by layer."""

    def write_block(self, group: int, block: int, content: Tensor) -> None:
        """Overwrite a block with bytes from `read_block`."""

    def grow(self, num_blocks: list[int]) -> None:
        """Enlarge the pools. Existing blocks keep their ids and bytes, and new blocks are zeroed.

        Raises:
            ConfigError: a pool would shrink.
            OutOfMemory: the larger pools don't fit in memory; no data is lost.
        """


class CacheFactory(Protocol):  # D227: needs nothing but a layout
    """Callable that creates a `CacheBackend`, such as a class with this constructor."""

    def __call__(self, layout: KVLayout, *, num_blocks: list[int], device: torch.device) -> CacheBackend:
        """Allocate `num_blocks` zeroed blocks, by layer group.

        Raises:
            ConfigError: this backend can't store the recipe, `layout.recipe`.
            OutOfMemory: the blocks don't fit in memory; nothing stays allocated.
        """


class _BackendStore(LayerStore):
    """Store for one layer of a backend whose `write` and `attend` take a layer index."""

    def __init__(self, cache: Any, layer: int) -> None:
        self._cache = cache
        self._layer = layer

    def batch_of(self, batches: Sequence[SequenceBatch]) -> LayerBatch:
        group: int = self._cache.group_of[self._layer]
        return batches[group]

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        bad: Tensor = self._cache.write(self._layer, k, v, slots)
        return bad

    def attend(self, q: Tensor, batch: LayerBatch, options: AttentionOptions) -> Attended:
        found: Attended = self._cache.attend(self._layer, q, batch, options)
        return found


class _WithStores:
    """Wrapper that adds a store per layer to a backend whose `write` and `attend` take a layer index."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.stores = {layer: _BackendStore(cache, layer) for layer in cache.group_of}

    @property
    def states(self) -> Any:  # looked up each time: `grow` may replace them
        return getattr(self._cache, "states", None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def with_stores(cache: Any) -> CacheBackend:
    """Return a cache in the form that models use. A cache without `stores` is wrapped."""
    return cast(CacheBackend, cache if hasattr(cache, "stores") else _WithStores(cache))


def cache_backends() -> list[str]:
    """Return the names that `cache_backend` accepts, without loading any backend."""
    return sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINTS))})


def cache_backend(name: str) -> CacheFactory:
    """Return the backend with this name, either built in or from an installed package's entry point.

    Raises:
        ConfigError: the name is unknown, two packages claim it, or the backend can't be loaded.
    """
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        return cast(CacheFactory, getattr(importlib.import_module(module), attribute))
    points = list(entry_points(group=ENTRY_POINTS, name=name))
    if not points:
        known = cache_backends()
        raise ConfigError(
            f"unknown cache backend {name!r}{nearest(name, known) or ';'} installed: {', '.join(known)}"
        )
    if len(points) > 1:
        raise ConfigError(
            f"cache backend {name!r} is claimed by {' and '.join(map(_source, points))}; keep one of them"
        )
    return _load(points[0])


def _load(point: EntryPoint) -> CacheFactory:
    try:
        factory: Any = point.load()
    except Exception as error:  # anything that third-party code raises at import
        raise ConfigError(
            f"cache backend {point.name!r} of {_source(point)} can't be loaded: "
            f"{type(error).__name__}: {first_lines(error)}; update or uninstall that package"
        ) from error
    if not callable(factory):
        raise ConfigError(
            f"cache backend {point.name!r} of {_source(point)} must be a class or a function that "
            f"makes a cache, got {type(factory).__name__}; update or uninstall that package"
        )
    return cast(CacheFactory, factory)


def _source(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else f"an unnamed package ({point.value})"
