"""Blocks of one layer in vLLM's memory. This module does not require vLLM.

vLLM moves, shares and drops entire pages; a page is [kv_heads, block_size, bytes per token and head] of one
layer. The attention backend defines the content: a page contains one layer's part of a kvq block, with codes
of K, codes of V, scales of K and scales of V in the layout that suits kvq's kernels best.
"""

from dataclasses import dataclass

from torch import Tensor

from kvq.cache.pool import paged_layer
from kvq.cache.stores.base import PagedStore
from kvq.cache.stores.centered import with_centers
from kvq.cache.stores.plain import PlainStore
from kvq.errors import ConfigError
from kvq.formats import KVRecipe
from kvq.geometry import LayerGeometry
from kvq.kernels import Device, KernelSpec, PagedKV, select
from kvq.layout import UNPADDED_TOKENS, LayerLayout, plan_layer


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:  # D340: a page is one layer's part of a kvq block, in separate regions
    """Layout of one layer's pages: the regions of codes and scales."""

    layout: LayerLayout
    recipe: KVRecipe
    block_size: int  # tokens

    @classmethod
    def of(
        cls, recipe: KVRecipe, layer: int, kv_heads: int, block_size: int, head_dims: tuple[int, int]
    ) -> "Page":
        """Return the page layout of a layer with `kv_heads` heads in this process; `head_dims`: (K, V).

        Raises:
            ConfigError: the recipe does not contain the layer, or has other head dimensions for it, or pages
                can't have this block size.
        """
        if not 0 <= layer < len(recipe.layers):
            raise ConfigError(f"the model has a layer {layer}, the recipe {len(recipe.layers)} layers")
        recipe.check_unstaged("vLLM's cache")
        if block_size % UNPADDED_TOKENS:
            raise ConfigError(f"kvq's blocks are of a multiple of {UNPADDED_TOKENS} tokens, got {block_size}")
        formats = recipe.layers[layer]
        if (formats.k_head_dim, formats.v_head_dim) != head_dims:
            raise ConfigError(
                f"layer {layer} has (K, V) head dimensions {head_dims}, in the recipe "
                f"{(formats.k_head_dim, formats.v_head_dim)}; make one for this model with `kvq tune`"
            )
        geometry = LayerGeometry(
            index=layer, kv_heads=kv_heads, k_head_dim=formats.k_head_dim, v_head_dim=formats.v_head_dim
        )
        return cls(layout=plan_layer(geometry, formats, block_size), recipe=recipe, block_size=block_size)

    @property
    def cell_bytes(self) -> int:
        """Bytes per token and head, the unit of page sizes in vLLM."""
        cells = self.layout.geometry.kv_heads * self.block_size
        assert self.layout.nbytes % cells == 0, "no part is padded"
        return self.layout.nbytes // cells

    def store(self, pages: Tensor, q_heads: int, softcap: float | None) -> PagedStore:  # D344
        """Return the layer's store in vLLM's pages, uint8 [num_blocks, kv_heads, block_size, cell_bytes].

        Raises:
            ConfigError: the pages have wrong shapes or strides, or K has a center and the model caps scores.
            UnsupportedKernel: no kernel supports the formats on this device.
        """
        own, device, paged = self.layout.geometry, pages.device, self.over(pages)
        spec = KernelSpec(
            formats=paged.formats, q_heads=q_heads, kv_heads=own.kv_heads, block_size=paged.block_size
        )
        kernels = {name: select(name, spec, Device.of(device)) for name in ("attend", "write_kv")}
        store = PlainStore(blocks=paged, group=0, kernels=kernels)
        return with_centers(store, self.recipe.centers, own, q_heads=q_heads, softcap=softcap, device=device)

    def over(self, pages: Tensor) -> PagedKV:
        """Return the layer's codes and scales in vLLM's pages; see `store`."""
        count, *shape = pages.shape
        cells = [self.layout.geometry.kv_heads, self.block_size, self.cell_bytes]
        inside = (self.block_size * self.cell_bytes, self.cell_bytes, 1)
        if shape != cells or pages.stride()[1:] != inside:
            raise ConfigError(
                f"vLLM's pages are {list(pages.shape)} bytes with strides {pages.stride()}, kvq's {cells} in "
                f"a row; is VLLM_KV_CACHE_LAYOUT set?"
            )
        stride = pages.stride(0)
        memory = pages.as_strided(((count - 1) * stride + self.layout.nbytes,), (1,))
        return paged_layer(memory, self.layout, self.recipe, stride, count)


def with_slots(k: Tensor, v: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return only the tokens with a slot: vLLM's padding has negative slots. All [tokens, ...], on a CPU."""
    if not len(slots) or int(slots.min()) >= 0:
        return k, v, slots
    kept = slots >= 0
    return k[kept], v[kept], slots[kept]
