"""KV cache: the block pools of one model on one device, and a store for each of its layers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvq.cache.blocks import BlockCache
from kvq.cache.memory import check_room
from kvq.cache.pool import PoolBytes
from kvq.cache.stores.base import Attended, LayerBatch, PagedStore
from kvq.cache.stores.make import kernel_spec, make_store
from kvq.cache.stores.recurrent import StateSlots
from kvq.kernels import AttentionOptions, Device, PagedKV, SequenceBatch, select
from kvq.kernels.paged import Rows
from kvq.layout import KVLayout, Role


class KVCache(BlockCache):
    """Blocks of all layer groups of one model on one device.

    `stores`: the objects that models write to and attend over, keyed by layer index; `grow` replaces them.
    Methods that take a layer index are shortcuts for the methods of the layer's store.
    """

    stores: dict[int, PagedStore]

    def __init__(
        self, layout: KVLayout, *, num_blocks: list[int], device: torch.device, backend: str = "auto"
    ) -> None:
        """Allocate pools of `num_blocks` blocks, with one entry per layer group of `layout`.

        Raises:
            ConfigError: a static format has no scales.
            OutOfMemory: the pools don't fit in memory; nothing stays allocated.
            UnsupportedKernel: no backend can run one of the layers.
        """
        layout.recipe.require_scales()
        self.layout = layout
        total = sum(g.pool_bytes(n) for g, n in zip(layout.groups, num_blocks, strict=True))
        check_room(total, device)
        self._pools = [PoolBytes(g, n, device) for g, n in zip(layout.groups, num_blocks, strict=True)]
        super().__init__(len(layout.groups))
        self._parts = [pool.parts for pool in self._pools]
        views = self._view()
        self.group_of = {
            layer.geometry.index: group.group.index for group in layout.sealed for layer in group.layers
        }
        self.stores = {
            index: make_store(layout, layer, group.group.index, views[index], device, backend)
            for group in layout.sealed
            for layer in group.layers
            for index in [layer.geometry.index]
        }
        # All backends move the same bytes, so the user's choice of backend does not matter here.
        spec = kernel_spec(layout, layout.sealed[0].layers[0])
        self._copy = select("copy_blocks", spec, Device.of(device))

    def pool(self, group: int) -> Tensor:
        """Return the bytes of one layer group's pool, uint8 [pool_bytes]. `grow` replaces the tensor."""
        return self._pools[group].memory

    def layer(self, index: int) -> PagedKV:
        """Return the blocks of one layer, or the sealed blocks if the layer is staged."""
        return self.stores[index].blocks

    def batch_of(self, layer: int, batches: Sequence[SequenceBatch]) -> LayerBatch:
        """Return a layer's batch for a step; see `LayerStore.batch_of`."""
        return self.stores[layer].batch_of(batches)

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        """Store new rows of one layer; see `LayerStore.write`."""
        return self.stores[layer].write(k, v, slots)

    def attend(self, layer: int, q: Tensor, batch: LayerBatch, options: AttentionOptions) -> Attended:
        """Attend over one layer; see `LayerStore.attend`."""
        return self.stores[layer].attend(q, batch, options)

    def gather(
        self, layer: int, tables: Tensor, start: int, end: int, *, unrotate: bool, out: Rows | None = None
    ) -> Rows:
        """Return K and V at the positions [start, end) of every table; see `LayerStore.gather`."""
        return self.stores[layer].gather(tables, start, end, unrotate=unrotate, out=out)

    def backend_of(self, operation: str, layer: int) -> str:
        """Return the name of the backend that runs `write_kv`, `attend` or `gather_dense` for a layer."""
        return self.stores[layer].backend_of(operation)

    def copy(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        self._check_blocks(group, [block for pair in pairs for block in pair])
        self._copy.run(self._parts[group], pairs)

    def grow(self, num_blocks: list[int]) -> None:
        """Enlarge the pools. Existing blocks keep their ids and bytes, and new blocks are zeroed.

        Existing tensors and stores keep referring to the old pools. The groups grow one after
        another, so the old and new bytes of only one group exist at the same time.

        Raises:
            ConfigError: a pool would shrink.
            OutOfMemory: the larger pools don't fit. Nothing was changed, unless a device refused memory that
            it had reported as free; in that case, some groups are larger and the others unchanged.
        """
        self._check_growth(num_blocks)
        peak = added = 0
        for pool, count in zip(self._pools, num_blocks, strict=True):
            new = pool.layout.pool_bytes(count) if count > pool.num_blocks else 0
            peak = max(peak, added + new)
            added += max(0, new - pool.memory.numel())
        check_room(peak, self._pools[0].memory.device)
        for index, count in enumerate(num_blocks):
            if count > self._pools[index].num_blocks:
                self._pools[index] = self._pools[index].grown(count)
                self._parts[index] = self._pools[index].parts
                views = self._view()
                self.stores = {layer: store.over(views[layer]) for layer, store in self.stores.items()}

    @torch.inference_mode(False)
    def _view(self) -> dict[int, dict[Role, PagedKV]]:
        """Return views of all layers' blocks in the pools, by layer index and role. Also set `states`.

        Views are created outside inference mode, so that they can be written in any mode.
        """
        views: dict[int, dict[Role, PagedKV]] = {}
        for pool in self._pools:
            role = pool.layout.role
            if role is Role.STATES:
                self.states = StateSlots(pool.layout, pool.parts[0])
            for position, layer in enumerate(pool.layout.layers):
                view = pool.layer(position, self.layout.recipe)
                views.setdefault(layer.geometry.index, {})[role] = view
        return views
