"""Cache backends: what an engine needs of a KV cache, and those that are installed."""

import importlib
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from kvq.blockmgr.events import Order, SwapIn
from kvq.cache.stores.base import Attended, LayerBatch, LayerStore
from kvq.cache.stores.recurrent import StateSlots
from kvq.errors import ConfigError, first_lines, nearest
from kvq.kernels import AttentionOptions, SequenceBatch
from kvq.layout import KVLayout

ENTRY_POINTS = "kvq.cache_backends"
# Named in pyproject.toml too; here so that they are found without installed metadata, and so that
# no other package can take their names.
_BUILT_IN = {"kvq": "kvq.cache.kv_cache:KVCache", "dense": "kvq.cache.dense_backend:DenseCache"}  # D228


class CacheBackend(Protocol):
    """Blocks of K and V of all layers, by layer group. `kvq.cache.conformance` tests one.

    `kvq.cache.blocks.BlockCache` is a base class with everything that moves whole blocks.
    Instead of `stores` a backend may have `group_of`, a dict from layer index to layer group, and
    `write(layer, k, v, slots)` and `attend(layer, q, batch, options)`, which do what those methods of a
    `LayerStore` do; `batch` is that of the layer's group.

    A slot is one token's place in a layer group: block * block_size + offset.
    """

    @property
    def stores(self) -> Mapping[int, LayerStore]:
        """Stores that a model writes to and attends from, by layer index; `grow` may replace them."""

    @property
    def states(self) -> StateSlots | None:
        """Recurrent states; None if the backend keeps none."""

    @property
    def num_blocks(self) -> list[int]:
        """Blocks per layer group."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated for all blocks on the device."""

    @property
    def host_bytes(self) -> int:
        """Bytes reserved for swapped-out blocks, in host memory or on a disk."""

    def copy(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, (source, target) each, as if one after another."""

    def scrub(self, group: int, blocks: Sequence[int]) -> None:
        """Zero blocks."""

    def swap_out(self, group: int, block: int, slot: int) -> None:
        """Copy a block to a host slot. What goes wrong there shows when it is swapped in.

        Raises:
            ConfigError: there is no such host slot.
        """

    def swap_in(self, group: int, slot: int, block: int) -> bool:
        """Bring a host slot's bytes into a block; False, and a zeroed block, if they are not intact."""

    def carry_out(self, orders: Sequence[Order]) -> list[SwapIn]:
        """Carry out a block manager's orders, strictly one after another.

        Returns the swap-ins that failed: their blocks are zeroed and their tokens have to be
        computed again.
        """

    def read_block(self, group: int, block: int) -> Tensor:
        """Return a copy of a block's bytes, uint8 [bytes of a block] on the host: layer after layer."""

    def write_block(self, group: int, block: int, content: Tensor) -> None:
        """Overwrite a block with what `read_block` gave."""

    def grow(self, num_blocks: list[int]) -> None:
        """Enlarge the pools; blocks keep their ids and bytes, new ones are zero.

        Raises:
            ConfigError: a pool would shrink.
            OutOfMemory: the larger pools don't fit; nothing is lost.
        """

    def close(self) -> None:
        """Give back what lies outside the device."""


class CacheFactory(Protocol):  # D227: made from a layout alone
    """Makes a `CacheBackend`; a class with this constructor is one."""

    def __call__(
        self,
        layout: KVLayout,
        *,
        num_blocks: list[int],
        device: torch.device,
        host_slots: list[int] | None = None,
        swap_folder: str | Path | None = None,
    ) -> CacheBackend:
        """Allocate `num_blocks` zeroed blocks and `host_slots` slots for swapping, per layer group.

        Raises:
            ConfigError: a recipe, `layout.recipe`, that this backend can't store.
            OutOfMemory: they don't fit; nothing stays allocated.
        """


class _BackendStore(LayerStore):
    """One layer of a backend that writes and attends by layer itself."""

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
    """A backend that writes and attends by layer itself, with a store for each layer."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.stores = {layer: _BackendStore(cache, layer) for layer in cache.group_of}

    @property
    def states(self) -> Any:  # those of now: a cache that grows may have others
        return getattr(self._cache, "states", None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def with_stores(cache: Any) -> CacheBackend:
    """Return a cache as models use it: one that has no `stores` gets them."""
    return cast(CacheBackend, cache if hasattr(cache, "stores") else _WithStores(cache))


def cache_backends() -> list[str]:
    """Return the names that `cache_backend` knows; loads none of them."""
    return sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINTS))})


def cache_backend(name: str) -> CacheFactory:
    """Return the backend of that name: built in, or of an installed package's entry point.

    Raises:
        ConfigError: no such name, two packages that claim it, or one that can't be loaded.
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
    except Exception as error:  # whatever somebody else's module raises while it is imported
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
