"""The KV cache: the tensors behind the block pools, and the kernels that write and read them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from kvq.cache.backend import CacheBackend
from kvq.cache.blocks import BlockCache
from kvq.cache.host_store import HostStore
from kvq.cache.memory import check_room
from kvq.cache.pool import PoolBytes
from kvq.cache.stores.centered import Centering
from kvq.cache.stores.recurrent import StateSlots
from kvq.cache.stores.staged import StagedLayer
from kvq.formats import ExactTokens, LayerCenters, LayerFormats
from kvq.kernels import (
    AttentionOptions,
    Device,
    Kernel,
    KernelSpec,
    PagedKV,
    SequenceBatch,
    StagedBatch,
    StagedKV,
    select,
)
from kvq.kernels.attend_latent.cpu import relative_speed
from kvq.kernels.plain import Rows, as_tokens, plain_blocks, tables_of_tokens
from kvq.kernels.rope_write.heads import LayerHeads
from kvq.layout import STAGED_FORMAT, KVLayout, LayerLayout, Role


class KVCache(BlockCache):
    """The blocks of all layer groups of one model on one device."""

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_blocks: list[int],
        device: torch.device,
        backend: str = "auto",
        host_slots: list[int] | None = None,
        swap_folder: str | Path | None = None,
    ) -> None:
        """Allocate pools of `num_blocks` blocks, one entry per layer group of `layout`.

        `host_slots`: blocks per layer group that can be swapped out, to host memory or to a file in
        `swap_folder`; None for no swapping.

        Raises:
            ConfigError: a static format without scales, or a folder in which no file can be made.
            OutOfMemory: the pools or the host store don't fit; nothing stays allocated.
            UnsupportedKernel: no backend can run a layer.
        """
        layout.recipe.require_scales()
        self.layout = layout
        total = sum(g.pool_bytes(n) for g, n in zip(layout.groups, num_blocks, strict=True))
        check_room(total, device)
        self._pools = [PoolBytes(g, n, device) for g, n in zip(layout.groups, num_blocks, strict=True)]
        super().__init__(len(layout.groups))
        self._views: dict[Role, dict[int, PagedKV]] = {role: {} for role in Role}  # then by layer
        self._kernels: dict[int, dict[str, Kernel]] = {}  # by layer and operation
        self._copy: list[Kernel] = []
        self._centering: dict[int, Centering] = {}
        self._staged: dict[int, StagedLayer] = {}
        self._stored: dict[int, StagedLayer] = {}  # of a staged recipe without a staging area: see `store`
        self.version = 0  # of the tensors and kernels behind layers: what was made of them before is stale
        self.group_of: dict[int, int] = {}
        self.states: StateSlots | None = None  # recurrent ones, if the model has any; others after `grow`
        where = Device.of(device)
        for group in layout.sealed:
            for layer in group.layers:
                self.group_of[layer.geometry.index] = group.group.index
                self._choose(layer, where, backend)
                self._center(layer, device)
        for group in layout.groups:
            # Every backend moves the same bytes, so the user's choice of one does not matter here.
            self._copy.append(select("copy_blocks", _kernel_spec(layout, layout.sealed[0].layers[0]), where))
            self._make_views(group.group.index)
        if host_slots is not None:
            self._host = HostStore(layout, host_slots, swap_folder)

    def _choose(self, layer: LayerLayout, where: Device, backend: str) -> None:
        """Choose a layer's kernels; of a staged one, those that write are the staging area's."""
        index, spec = layer.geometry.index, _kernel_spec(self.layout, layer)
        written = spec
        if self.layout.recipe.is_staged and not self.layout.is_staged:
            plain = LayerFormats.plain(STAGED_FORMAT, layer.geometry.k_head_dim, layer.geometry.v_head_dim)
            written = replace(spec, formats=plain, block_size=1)
            self._stored[index] = StagedLayer(spec, written, where, backend)
        if self.layout.is_staged:
            staging = self.layout.staging_of(self.group_of[index]).layers
            written = next(_kernel_spec(self.layout, x) for x in staging if x.geometry.index == index)
            sees_old = self.layout.written_from(self.group_of[index]) is not None
            self._staged[index] = StagedLayer(
                spec, written, where, backend, sees_old=sees_old, is_latent=layer.geometry.is_latent
            )
        attend = "attend_latent" if layer.geometry.is_latent else "attend"
        self._kernels[index] = {
            "write_kv": select("write_kv", written, where, backend),
            "attend": select(attend, spec, where, backend),
            "gather_dense": select("gather_dense", spec, where, backend),
        }
        if not layer.geometry.is_latent:
            fused = backend if backend.startswith(("reference", "triton")) else "auto"  # C++: see CpuDecoder
            self._kernels[index]["rope_write"] = select("rope_write", written, where, fused)

    def _center(self, layer: LayerLayout, device: torch.device) -> None:
        """Make what takes out a layer's calibrated centers, if the recipe has any."""
        index, centers = layer.geometry.index, self.layout.recipe.centers
        if centers is not None and centers.layers[index] != LayerCenters():
            self._centering[index] = Centering(
                centers.layers[index],
                layer,
                q_heads=self.layout.geometry.q_heads_of(index),
                softcap=self.layout.geometry.softcap,
                device=device,
            )

    def pool(self, group: int) -> Tensor:
        """The bytes of one layer group's pool, uint8 [pool_bytes]. Another tensor after `grow`."""
        return self._pools[group].memory

    def layer(self, index: int) -> PagedKV:
        """The blocks of one layer; of a staged one, the sealed ones."""
        return self._views[Role.SEALED][index]

    def batch_of(self, layer: int, batches: Sequence[SequenceBatch]) -> SequenceBatch | StagedBatch:
        """What `attend` takes, of the batches of all layer groups. Its `slots` are those to write to."""
        group = self.group_of[layer]
        if layer not in self._staged:
            return batches[group]
        kinds = len(self.layout.sealed)
        recent, sinks = group + kinds, group + 2 * kinds
        return StagedBatch(
            sealed=batches[group],
            recent=batches[recent],
            sinks=batches[sinks] if sinks < len(self.layout.attended) else None,
        )

    def seal(self, layer: int, batch: StagedBatch) -> None:
        """Quantize what a step's new tokens, written before, make old enough: as `attend` does first."""
        self._staged[layer].seal(self.staged(layer), batch)

    def backend_of(self, operation: str, layer: int) -> str:
        """Which backend runs `write_kv`, `attend` or `gather_dense` on a layer's blocks."""
        return self._kernels[layer][operation].backend

    def in_cpp(self, layer: int) -> tuple[PagedKV | StagedKV, bool] | None:
        """A layer's blocks, and whether attention is exact; None if more than C++ has a part in it."""
        backend, staged = self.backend_of("attend", layer), self._staged.get(layer)
        writing = self.backend_of("write_kv", layer), "cpu" if staged is None else staged.seal_backend
        is_cpp = all(x in ("cpu", "cpu-fp32") for x in (backend, *writing))
        is_latent = "rope_write" not in self._kernels[layer]
        if layer in self._centering or not is_cpp or is_latent:
            return None
        return (self.layer(layer) if staged is None else self.staged(layer)), backend == "cpu-fp32"

    def sees_old(self, layer: int) -> bool:
        """True if queries of a staged layer see sealed blocks: False if a window ends before any."""
        return self._staged[layer].sees_old

    def absorbed_rate(self, layer: int) -> float:
        """How many products of a latent layer's kernel take the time of one that is made head by head."""
        backend = self.backend_of("attend", layer)
        if not backend.startswith("cpu"):
            return 1.0
        return relative_speed(self.layer(layer), exact=backend == "cpu-fp32")

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        """`write_kv` for one layer; returns bool [tokens], True where a row was not finite."""
        if layer in self._centering:
            k, v = self._centering[layer].centered(k, v)
        bad: Tensor = self._kernels[layer]["write_kv"].run(k, v, self._written(layer), slots)
        return bad

    def rope_write(
        self,
        layer: int,
        joined: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        slots: Tensor,
        bad: Tensor,
        heads: LayerHeads,
    ) -> None:
        """`rope_write` for one layer, with the recipe's centers; flags what was not finite in `bad`."""
        if layer in self._centering:
            heads = self._centering[layer].taken_from(heads)
        self._kernels[layer]["rope_write"].run(joined, angles, self._written(layer), slots, bad, heads)

    def store(self, layer: int, k: Tensor, v: Tensor, blocks: Sequence[int]) -> None:
        """Quantize whole blocks [blocks, kv_heads, block_size, dim], of tokens that waited elsewhere.

        For a staged recipe under a layout without a staging area.
        """
        own = plain_blocks(*self._centered(layer, k, v), self.layout.block_size)
        end = [len(blocks) * self.layout.block_size]
        step = SequenceBatch.of([range(len(blocks))], [], end, end, k.device)
        sealed = SequenceBatch.of([blocks], [], end, end, k.device)
        kv = StagedKV(sealed=self.layer(layer), recent=own, sinks=None, exact=ExactTokens())
        self._stored[layer].seal(kv, StagedBatch(sealed=sealed, recent=step, sinks=None))

    def attend_stored(
        self, layer: int, q: Tensor, recent: Rows, batch: SequenceBatch, options: AttentionOptions
    ) -> Tensor:
        """`attend` from stored blocks and from the last rows as they came, [sequences, kv_heads, some, dim].

        Which form of a token a query sees depends on their positions alone, as in a staging area.
        """
        recent = self._centered(layer, *recent)
        own, name = as_tokens(recent), (tables_of_tokens, recent[0].shape, recent[0].stride())
        if name not in batch.kept:
            batch.kept[name] = replace(batch, tables=tables_of_tokens(recent, batch.context_lens))
        both = StagedBatch(sealed=batch, recent=batch.kept[name], sinks=None)
        kv = StagedKV(sealed=self.layer(layer), recent=own, sinks=None, exact=self.layout.recipe.exact)
        kernel, centering = self._stored[layer].attend_sealed, self._centering.get(layer)
        if centering is None:
            return kernel(q, kv, both, options)[0]
        return centering.attended(kernel, q, kv, both, options)[0]

    def _centered(self, layer: int, k: Tensor, v: Tensor) -> Rows:
        """Rows [any, kv_heads, any, dim] without the recipe's centers, K's and V's in memory alike."""
        if layer not in self._centering:
            return k, v
        k, v = self._centering[layer].centered(k.transpose(1, 2), v.transpose(1, 2))
        return k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()

    def attend(
        self, layer: int, q: Tensor, batch: SequenceBatch | StagedBatch, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        """`attend` for one layer; returns (out, lse). A staged layer's blocks are sealed first."""
        kernel: Callable[..., tuple[Tensor, Tensor]] = self._kernels[layer]["attend"].run
        kv: PagedKV | StagedKV = self.layer(layer)
        assert isinstance(batch, StagedBatch) == (layer in self._staged), "see batch_of"
        if isinstance(batch, StagedBatch):
            kernel, kv = self._staged[layer].attend, self.staged(layer)
        centering = self._centering.get(layer)
        if centering is None:
            return kernel(q, kv, batch, options)
        return centering.attended(kernel, q, kv, batch, options)

    def _written(self, layer: int) -> PagedKV:
        """Where a layer's new tokens go."""
        return self._views[Role.RECENT if layer in self._staged else Role.SEALED][layer]

    def staged(self, layer: int) -> StagedKV:
        """The blocks of a staged layer."""
        return StagedKV(
            sealed=self._views[Role.SEALED][layer],
            recent=self._views[Role.RECENT][layer],
            sinks=self._views[Role.SINKS].get(layer),
            exact=self.layout.exact,
        )

    def gather(
        self,
        layer: int,
        tables: Tensor,
        start: int,
        end: int,
        *,
        unrotate: bool,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`gather_dense` for one layer: K and V of the positions [start, end) of every table."""
        rows: tuple[Tensor, Tensor] = self._kernels[layer]["gather_dense"].run(
            self.layer(layer), tables, start, end, unrotate=unrotate, out=out
        )
        if layer in self._centering:
            self._centering[layer].add_to(*rows, unrotate=unrotate)
        return rows

    def copy(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        self._check_blocks(group, [block for pair in pairs for block in pair])
        self._copy[group].run(self._parts[group], pairs)

    def grow(self, num_blocks: list[int]) -> None:
        """Enlarge the pools; blocks keep their ids and their bytes, new ones are zero.

        Tensors that `pool` and `layer` gave before belong to the old pools. One group grows after
        the other, so the old and new bytes of a single group exist at once.

        Raises:
            ConfigError: a pool would shrink.
            OutOfMemory: the larger pools don't fit. Nothing has changed, unless a device refused
                what it had reported free; then some groups are larger and the others as before.
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
                self._make_views(index)

    @torch.inference_mode(False)
    def _make_views(self, group: int) -> None:
        """View a pool anew. Views made during inference could not be written outside it."""
        self.version += 1
        self._parts[group] = self._pools[group].parts
        layout = self.layout.groups[group]
        if layout.role is Role.STATES:
            [memory] = self._parts[group]
            self.states = StateSlots(layout, memory)
        for position, layer in enumerate(layout.layers):
            view = self._pools[group].layer(position, self.layout.recipe)
            self._views[layout.role][layer.geometry.index] = view


def _kernel_spec(layout: KVLayout, layer: LayerLayout) -> KernelSpec:
    return KernelSpec(
        formats=layer.formats,
        q_heads=layout.geometry.q_heads_of(layer.geometry.index),
        kv_heads=layer.geometry.kv_heads,
        block_size=layout.block_size,
        is_staged=layout.recipe.is_staged,
    )


def slots_of(cache: CacheBackend, layer: int, batches: Sequence[SequenceBatch]) -> Tensor:
    """Where a layer's new tokens are written to, of the batches of all layer groups of any cache."""
    if isinstance(cache, KVCache):
        return cache.batch_of(layer, batches).slots
    return batches[cache.group_of[layer]].slots


def attended(
    cache: CacheBackend, layer: int, q: Tensor, batches: Sequence[SequenceBatch], options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """`attend` of any cache, of the batches of all layer groups: kvq's staged layers need several."""
    if isinstance(cache, KVCache):
        return cache.attend(layer, q, cache.batch_of(layer, batches), options)
    return cache.attend(layer, q, batches[cache.group_of[layer]], options)
