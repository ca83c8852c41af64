"""Latent attention: the tensors' storage shows whether K and V were expanded from latents.

In latent attention, one Linear layer of the attention module outputs V and a part of K for each head; the
rest of K, shared by all heads, is the rotary part. The storage reveals this even on the meta device.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kvq.geometry import Expansion

Product = tuple[nn.Linear, Tensor, Tensor]  # a Linear layer, its input and its output


def latent_dims(  # D201: V is a view of one Linear layer's result
    module: nn.Module, products: Sequence[Product], query: Tensor, key: Tensor, value: Tensor
) -> tuple[int, int, Expansion] | None:
    """Return how K and V, [1, heads, tokens, dim], expand from latents; None if they don't or are smaller.

    The result contains the dimensions of latents and of the keys' rotary part, stored once for all heads.
    On a device with values, K must also match the layer's output.
    """
    own = set(module.children())
    made = next((x for x in products if x[0] in own and _storage(x[2]) == _storage(value)), None)
    if made is None or query.shape[1] != key.shape[1]:
        return None
    linear, given, output = made
    bias: Tensor | None = linear.bias
    if bias is not None:
        return None
    heads, tokens, v_dim = value.shape[1:]
    width, rest = divmod(linear.out_features, heads)
    k_dim, rotary, latent = width - v_dim, key.shape[3] - (width - v_dim), linear.in_features
    if rest or k_dim < 1 or rotary < 1 or given.numel() != tokens * latent:
        return None
    if latent + rotary >= heads * (key.shape[3] + v_dim):
        return None
    parts = output.reshape(1, tokens, heads, width).transpose(1, 2)
    if (value.storage_offset(), value.stride()) != (k_dim, parts[..., k_dim:].stride()):
        return None
    if key.device.type != "meta" and not _holds(key, parts[..., :k_dim]):
        return None
    return latent, rotary, Expansion(k_dim=k_dim, v_dim=v_dim)


def _storage(tensor: Tensor) -> int:
    storage: int = tensor.untyped_storage()._cdata
    return storage


def _holds(key: Tensor, own: Tensor) -> bool:
    """Return True if K consists of `own` followed by a part that all heads share."""
    rest = key[..., own.shape[3] :]
    return torch.equal(key[..., : own.shape[3]], own) and torch.equal(rest, rest[:, :1].expand_as(rest))
