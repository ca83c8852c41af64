"""Factory for layer stores: the only place that checks a layer's kind."""

from dataclasses import replace

import torch

from kvq.cache.stores.base import PagedStore, Views
from kvq.cache.stores.centered import with_centers
from kvq.cache.stores.latent import LatentStore
from kvq.cache.stores.plain import PlainStore
from kvq.cache.stores.staged import StagedStore, WholeBlockStore, staged_views
from kvq.formats import LayerFormats
from kvq.kernels import Device, Kernel, KernelSpec, select
from kvq.layout import STAGED_FORMAT, KVLayout, LayerLayout, Role


def make_store(
    layout: KVLayout, layer: LayerLayout, group: int, views: Views, device: torch.device, backend: str
) -> PagedStore:
    """Choose the kernels and the store of a layer. `group`: the layer group of its sealed blocks.

    Raises:
        ConfigError: the layer can't use the calibrated centers.
        UnsupportedKernel: no backend can run the layer.
    """
    # D379: the only place that checks the kind
    own, blocks = layer.geometry, views[Role.SEALED]
    kernels = _kernels(layout, layer, group, Device.of(device), backend)
    store: PagedStore
    if layout.is_staged:
        store = StagedStore(
            blocks=blocks,
            kv=staged_views(views, layout.exact),
            group=group,
            num_kinds=len(layout.sealed),
            sees_old=layout.written_from(group) is not None,
            kernels=kernels,
        )
    elif layout.recipe.is_staged:
        store = WholeBlockStore(blocks=blocks, group=group, kernels=kernels, exact=layout.recipe.exact)
    elif own.is_latent:
        store = LatentStore(blocks=blocks, group=group, kernels=kernels, geometry=own)
    else:
        store = PlainStore(blocks=blocks, group=group, kernels=kernels)
    q_heads, softcap = layout.geometry.q_heads_of(own.index), layout.geometry.softcap
    return with_centers(store, layout.recipe.centers, own, q_heads=q_heads, softcap=softcap, device=device)


def kernel_spec(layout: KVLayout, layer: LayerLayout) -> KernelSpec:
    """Return the properties of a layer that kernels depend on."""
    return KernelSpec(
        formats=layer.formats,
        q_heads=layout.geometry.q_heads_of(layer.geometry.index),
        kv_heads=layer.geometry.kv_heads,
        block_size=layout.block_size,
        is_staged=layout.recipe.is_staged,
    )


def _kernels(
    layout: KVLayout, layer: LayerLayout, group: int, device: Device, backend: str
) -> dict[str, Kernel]:
    """Choose a layer's kernels by operation. In a staged recipe, new tokens go to the staging blocks."""
    spec, is_latent = kernel_spec(layout, layer), layer.geometry.is_latent
    written = _spec_of_written(layout, layer, group, spec)
    attend = "attend_latent" if is_latent else "attend"
    kernels = {
        "write_kv": select("write_kv", written, device, backend),
        "attend": select(attend, spec, device, backend),
        "gather_dense": select("gather_dense", spec, device, backend),
    }
    if not is_latent:
        fused = backend if backend.startswith(("reference", "triton")) else "auto"  # C++: see CpuDecoder
        kernels["rope_write"] = select("rope_write", written, device, fused)
    if layout.recipe.is_staged:
        kernels["seal"] = select("seal", spec, device, backend)
        kernels["attend_recent"] = select(attend, written, device, backend)
        kernels["merge_partials"] = select("merge_partials", written, device)
    return kernels


def _spec_of_written(layout: KVLayout, layer: LayerLayout, group: int, spec: KernelSpec) -> KernelSpec:
    """Return the spec of the blocks that receive new tokens; if staged, these are the recent blocks."""
    own = layer.geometry
    if layout.is_staged:
        staging = layout.staging_of(group).layers
        return next(kernel_spec(layout, x) for x in staging if x.geometry.index == own.index)
    if not layout.recipe.is_staged:
        return spec
    plain = LayerFormats.plain(STAGED_FORMAT, own.k_head_dim, own.v_head_dim)
    return replace(spec, formats=plain, block_size=1)
