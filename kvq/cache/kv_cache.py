"""The KV cache: the tensors behind the block pools, and the kernels that write and read them."""

import torch
from torch import Tensor

from kvq.cache.memory import allocate_bytes
from kvq.errors import ConfigError
from kvq.formats import KVFormat, KVRecipe
from kvq.geometry import ModelGeometry
from kvq.kernels import Device, Kernel, KernelSpec, PagedKV, PagedRows, SequenceBatch, select
from kvq.kernels.codec import CODE_DTYPES
from kvq.layout import GroupLayout, KVLayout, LayerLayout, Region


class KVCache:
    """The blocks of all layer groups of one model on one device."""

    def __init__(
        self,
        geometry: ModelGeometry,
        recipe: KVRecipe,
        layout: KVLayout,
        *,
        num_blocks: list[int],
        device: torch.device,
        backend: str = "auto",
    ) -> None:
        """Allocate pools of `num_blocks` blocks, one entry per layer group of `layout`.

        Raises:
            ConfigError: a static format without scales.
            OutOfMemory: the pools don't fit on the device; nothing stays allocated.
            UnsupportedKernel: no backend can run a layer.
        """
        recipe.require_scales()
        self.layout = layout
        self.num_blocks = num_blocks
        total = sum(g.pool_bytes(n) for g, n in zip(layout.groups, num_blocks, strict=True))
        self._memory = allocate_bytes(total, device)
        self._pools: list[Tensor] = []
        self._layers: dict[int, PagedKV] = {}
        self._write: dict[int, Kernel] = {}
        self._attend: dict[int, Kernel] = {}
        self.group_of: dict[int, int] = {}
        where = Device.of(device)
        offset = 0
        for group, count in zip(layout.groups, num_blocks, strict=True):
            pool = self._memory[offset : offset + group.pool_bytes(count)]
            offset += group.pool_bytes(count)
            self._pools.append(pool)
            for position, layer in enumerate(group.layers):
                index = layer.geometry.index
                self._layers[index] = _layer_views(pool, group, position, count, recipe)
                self.group_of[index] = group.group.index
                spec = KernelSpec(
                    formats=layer.formats,
                    q_heads=geometry.q_heads,
                    kv_heads=layer.geometry.kv_heads,
                    block_size=layout.block_size,
                )
                self._write[index] = select("write_kv", spec, where, backend)
                self._attend[index] = select("attend", spec, where, backend)

    @property
    def nbytes(self) -> int:
        """Bytes allocated for all pools."""
        return self._memory.numel()

    def pool(self, group: int) -> Tensor:
        """The bytes of one layer group's pool, uint8 [pool_bytes]."""
        return self._pools[group]

    def layer(self, index: int) -> PagedKV:
        """The blocks of one layer."""
        return self._layers[index]

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        """`write_kv` for one layer; returns bool [tokens], True where a row was not finite."""
        bad: Tensor = self._write[layer].run(k, v, self._layers[layer], slots)
        return bad

    def attend(
        self,
        layer: int,
        q: Tensor,
        batch: SequenceBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """`attend` for one layer; returns (out, lse)."""
        result: tuple[Tensor, Tensor] = self._attend[layer].run(
            q, self._layers[layer], batch, scale=scale, window=window, softcap=softcap, sinks=sinks
        )
        return result

    def scrub(self, group: int, blocks: list[int]) -> None:
        """Zero the bytes of blocks: codes, scales and padding."""
        layout, count = self.layout.groups[group], self.num_blocks[group]
        for block in blocks:
            for run in layout.runs(block, count):
                self._pools[group][run.offset : run.offset + run.nbytes] = 0


def _layer_views(
    pool: Tensor, group: GroupLayout, position: int, num_blocks: int, recipe: KVRecipe
) -> PagedKV:
    layer = group.layers[position]
    base = group.base(position, num_blocks)
    stride = group.block_stride(position)

    def rows(part: str, fmt: KVFormat, codes: Region, scales: Region) -> PagedRows:
        static = None
        if fmt.is_static:
            assert recipe.static_scales is not None, "checked by KVCache"
            maxima = recipe.static_scales.layers[layer.geometry.index]
            static = torch.tensor(maxima.scales(part, fmt), dtype=torch.float32, device=pool.device)
            if len(static) != layer.geometry.kv_heads:
                raise ConfigError(
                    f"layer {layer.geometry.index} has {layer.geometry.kv_heads} KV heads, its static "
                    f"scales {len(static)}; run `kvq calibrate MODEL --out kvq.json`"
                )
        return PagedRows(
            codes=_view(
                pool, CODE_DTYPES[fmt.code], layer, codes, base, stride, num_blocks, group.block_size
            ),
            scales=_view(pool, torch.float16, layer, scales, base, stride, num_blocks, group.block_size)
            if scales.row_bytes
            else None,
            static_scale=static,
        )

    return PagedKV(
        k=rows("k", layer.formats.k, layer.k_codes, layer.k_scales),
        v=rows("v", layer.formats.v, layer.v_codes, layer.v_scales),
        formats=layer.formats,
        block_size=group.block_size,
    )


def _view(
    pool: Tensor,
    dtype: torch.dtype,
    layer: LayerLayout,
    region: Region,
    base: int,
    block_stride: int,
    num_blocks: int,
    block_size: int,
) -> Tensor:
    """View a region of every block as [num_blocks, kv_heads, block_size, row] of `dtype`."""
    size = dtype.itemsize
    row = region.row_bytes // size
    return pool.view(dtype).as_strided(
        (num_blocks, layer.geometry.kv_heads, block_size, row),
        (block_stride // size, block_size * row, row, 1),
        pool.view(dtype).storage_offset() + (base + region.offset) // size,
    )
