"""Views of a pool's bytes as one layer's codes and scales."""

import torch
from torch import Tensor

from kvq.cache.pool import PoolBytes
from kvq.errors import ConfigError
from kvq.formats import KVFormat, KVRecipe
from kvq.kernels import PagedKV, PagedRows
from kvq.kernels.codec import code_dtype
from kvq.layout import LayerLayout, Region


def layer_views(pool: PoolBytes, position: int, recipe: KVRecipe) -> PagedKV:
    """View a pool as the codes and scales of the layer at `position` in its group.

    Raises:
        ConfigError: static scales for another number of KV heads.
    """
    group, num_blocks, memory = pool.layout, pool.num_blocks, pool.memory
    layer = group.layers[position]
    base = group.base(position, num_blocks)
    stride = group.block_stride(position)

    def rows(part: str, fmt: KVFormat, codes: Region, scales: Region) -> PagedRows:
        static = None
        if fmt.is_static:
            assert recipe.static_scales is not None, "checked by KVCache"
            maxima = recipe.static_scales.layers[layer.geometry.index]
            static = torch.tensor(maxima.scales(part, fmt), dtype=torch.float32, device=memory.device)
            if len(static) != layer.geometry.kv_heads:
                raise ConfigError(
                    f"layer {layer.geometry.index} has {layer.geometry.kv_heads} KV heads, its static "
                    f"scales {len(static)}; run `kvq calibrate MODEL --out kvq.json`"
                )
        return PagedRows(
            codes=_view(
                memory, code_dtype(fmt.code), layer, codes, base, stride, num_blocks, group.block_size
            ),
            scales=_view(memory, torch.float16, layer, scales, base, stride, num_blocks, group.block_size)
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
