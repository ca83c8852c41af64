"""Bytes of one layer group's blocks, viewed by block or by layer."""

import torch
from torch import Tensor

from kvq.cache.memory import allocate_bytes
from kvq.errors import ConfigError
from kvq.formats import KVFormat, KVRecipe
from kvq.kernels import PagedKV, PagedRows
from kvq.kernels.codec import code_dtype
from kvq.layout import GroupLayout, LayerLayout, Region


class PoolBytes:
    """One layer group's pool on one device."""

    def __init__(self, layout: GroupLayout, num_blocks: int, device: torch.device) -> None:
        """Allocate a zeroed pool.

        Raises:
            OutOfMemory: the pool does not fit on the device; nothing was allocated.
        """
        self.layout = layout
        self.num_blocks = num_blocks
        self.memory = allocate_bytes(layout.pool_bytes(num_blocks), device)  # uint8 [pool_bytes]
        # One uint8 [num_blocks, run bytes] per run of a block; the runs of adjacent blocks are contiguous.
        self.parts = tuple(
            self.memory[run.offset : run.offset + num_blocks * run.nbytes].view(num_blocks, run.nbytes)
            for run in layout.runs(0, num_blocks)
        )

    def layer(self, position: int, recipe: KVRecipe) -> PagedKV:
        """Return the codes and scales of the layer at `position` in its group.

        Raises:
            ConfigError: the static scales are for a different number of KV heads.
        """
        base, stride = self.layout.base(position, self.num_blocks), self.layout.block_stride(position)
        return paged_layer(self.memory[base:], self.layout.layers[position], recipe, stride, self.num_blocks)

    def grown(self, num_blocks: int) -> "PoolBytes":
        """Return a larger copy of the pool, with the same bytes and block ids. This pool is unchanged.

        Raises:
            OutOfMemory: both pools together don't fit on the device.
        """
        larger = PoolBytes(self.layout, num_blocks, self.memory.device)
        for new, old in zip(larger.parts, self.parts, strict=True):
            new[: self.num_blocks] = old
        return larger


def paged_layer(
    memory: Tensor, layer: LayerLayout, recipe: KVRecipe, stride: int, num_blocks: int
) -> PagedKV:
    """Return one layer's codes and scales, in blocks that start every `stride` bytes in `memory`, uint8.

    Raises:
        ConfigError: the static scales are for a different number of KV heads.
    """
    heads = layer.geometry.kv_heads
    block_size = layer.k_codes.nbytes // (heads * layer.k_codes.row_bytes)

    def view(region: Region, dtype: torch.dtype, rows: int = block_size) -> Tensor:
        """Return a region of all blocks as [num_blocks, kv_heads, rows, row] in `dtype`."""
        size, typed = dtype.itemsize, memory[: memory.numel() // 16 * 16].view(dtype)
        row = region.row_bytes // size
        return typed.as_strided(
            (num_blocks, heads, rows, row),
            (stride // size, rows * row, row, 1),
            typed.storage_offset() + region.offset // size,
        )

    def scales_of(fmt: KVFormat, region: Region) -> Tensor | None:
        if not region.row_bytes:
            return None
        if fmt.is_per_channel:  # one row, shared by all tokens of the block
            return view(region, torch.uint8, rows=1).expand(-1, -1, block_size, -1)
        return view(region, torch.uint8 if fmt.is_narrow else torch.float16)

    def rows(part: str, fmt: KVFormat, codes: Region, scales: Region, means: Region) -> PagedRows:
        return PagedRows(
            codes=view(codes, code_dtype(fmt.code)),
            scales=scales_of(fmt, scales),
            static_scale=_static_scale(recipe, layer, part, fmt, memory.device),
            means=view(means, torch.uint8, rows=1)[:, :, 0] if means.row_bytes else None,
        )

    return PagedKV(
        k=rows("k", layer.formats.k, layer.k_codes, layer.k_scales, layer.k_means),
        v=rows("v", layer.formats.v, layer.v_codes, layer.v_scales, layer.v_means),
        formats=layer.formats,
        block_size=block_size,
    )


def _static_scale(
    recipe: KVRecipe, layer: LayerLayout, part: str, fmt: KVFormat, device: torch.device
) -> Tensor | None:
    """Return the static scales, fp32 [kv_heads], or None if the format has none."""
    if not fmt.is_static:
        return None
    assert recipe.static_scales is not None, "checked by KVCache"
    index, heads = layer.geometry.index, layer.geometry.kv_heads
    scales = recipe.static_scales.layers[index].scales(part, fmt)
    if len(scales) != heads:
        raise ConfigError(
            f"layer {index} has {heads} KV heads, its static scales {len(scales)}; run "
            f"`kvq calibrate MODEL --out kvq.json`"
        )
    return torch.tensor(scales, dtype=torch.float32, device=device)
