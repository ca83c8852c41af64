"""Placing a LoRA adapter in memory, in the layout of the kernels that run its model."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from kvq.kernels.adapters.cpu import PRODUCTS, CpuAdapter, CpuFactors
from kvq.kernels.native.library import load
from kvq.kernels.native.pages import own_pages
from kvq.models.adapters.folder import Shapes, StoredAdapter
from kvq.models.loading.fused_layers import is_fused
from kvq.models.loading.weights import LoadedWeights
from kvq.models.parts.adapters import Adapter
from kvq.weights.linear import ROUTERS, PackedLinear

_WEIGHTS = (  # of each of `PRODUCTS`, in the order of their outputs
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"),
    ("mlp.down_proj",),
)


def adaptable(model: Any) -> Shapes:
    """Return the inputs and outputs of the Linear layers that adapters may change: no head, no routers."""
    head = model.get_output_embeddings()
    return {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | PackedLinear)
        and module is not head
        and name.rpartition(".")[2] not in ROUTERS
    }


def place(stored: StoredAdapter, weights: LoadedWeights) -> Adapter:
    """Return an adapter on the device of its model."""
    if weights.device.type == "cpu" and not isinstance(load(), str):
        take = own_pages()
        own = {layer: CpuFactors(factors, take) for layer, factors in stored.factors.items()}
        compiled = _compiled(own, weights.model) if is_fused(weights.model) else None
        return Adapter(updates=own, compiled=compiled)
    device = weights.device
    return Adapter(updates={layer: factors.to(device) for layer, factors in stored.factors.items()})


def _compiled(updates: Mapping[str, CpuFactors], model: Any) -> CpuAdapter:
    names = {module: name for name, module in model.named_modules()}
    shapes = adaptable(model)
    layers = []
    for layer in model.base_model.layers:
        products: dict[str, list[tuple[int, CpuFactors]]] = {}
        for product, ends in zip(PRODUCTS, _WEIGHTS, strict=True):
            first, chain = 0, products.setdefault(product, [])
            for name in (f"{names[layer]}.{end}" for end in ends):
                if name in updates:
                    chain.append((first, updates[name]))
                first += shapes[name][1] if name in shapes else 0
        layers.append(products)
    return CpuAdapter(layers)
