"""Latent attention: kvq's own layers in place of the Linear layers that expand latents."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kvq.cache.stores.expansion import LatentExpansion
from kvq.cache.transformers.attention import EXPANSION, PACKED_NAME
from kvq.errors import ModelError
from kvq.geometry import LayerGeometry, ModelGeometry
from kvq.weights.linear import PackedLinear, PlainLinear


def attach_expansions(
    model: nn.Module, geometry: ModelGeometry, dtype: torch.dtype, *, packed: bool = False
) -> None:
    """Put a `LatentExpansion` in place of the Linear layer that expands latents, in each layer with latents.

    Quantized weights are dequantized. `dtype`: computation dtype. `packed`: use kvq's kernels on a CPU.

    Raises:
        ModelError: a layer with latents has no such Linear layer, or several.
    """
    latent = {layer.number: layer for layer in geometry.layers if layer.expansion is not None}
    if not latent:
        return
    found: dict[int, tuple[nn.Module, str]] = {}
    for number, attention, name in _candidates(model, latent, geometry.q_heads):
        if number in found:
            raise ModelError(
                f"kvq does not run {geometry.model_type}: layer {number} may expand its latents in "
                f"{found[number][1]} or {name}"
            )
        found[number] = attention, name
    if missing := sorted(latent.keys() - found.keys()):
        raise ModelError(
            f"kvq does not run {geometry.model_type}: layer {missing[0]} has no Linear layer for its latents"
        )
    for number, (attention, name) in found.items():
        dims = latent[number].expansion
        assert dims is not None, "chosen by it"
        weight = _weight(getattr(attention, name), next(model.parameters()).device).to(dtype)
        made = LatentExpansion(weight, geometry.q_heads, dims, attention.config, PACKED_NAME, packed=packed)
        setattr(attention, name, made)
        object.__setattr__(attention, EXPANSION, made)  # without registering its parameter twice


def _candidates(
    model: nn.Module, latent: dict[int, LayerGeometry], q_heads: int
) -> Iterator[tuple[int, Any, str]]:
    for module in model.modules():
        number = getattr(module, "layer_idx", None)
        if type(number) is not int or number not in latent or not hasattr(module, "config"):
            continue
        layer = latent[number]
        assert layer.expansion is not None, "chosen by it"
        for name, child in module.named_children():
            if not isinstance(child, nn.Linear | PackedLinear) or child.bias is not None:
                continue
            width = q_heads * (layer.expansion.k_dim + layer.expansion.v_dim)
            if (child.in_features, child.out_features) == (layer.v_head_dim, width):
                yield number, module, name


@torch.inference_mode()
def _weight(linear: nn.Linear | PackedLinear, device: torch.device) -> Tensor:
    """Return the weight [out, in], dequantized if it is quantized."""
    if isinstance(linear, PlainLinear):
        return linear.weight
    if type(linear) is nn.Linear:
        return linear.weight.detach()
    found: Tensor = linear(torch.eye(linear.in_features, device=device, dtype=torch.float32))
    return found.transpose(0, 1).contiguous()
