"""Latent attention: recognizes K and V that were multiplied out from latents, by where their tensors lie.

V of latent attention is a part of what a Linear layer of the attention module gave, beside a part of K, head
by head; the rest of K, the same for all heads, is what positions turn. That holds on the meta device, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kvq.geometry import Expansion


class Product(NamedTuple):
    """Input and output of a Linear layer."""

    linear: nn.Linear
    input: Tensor
    output: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _LatentDims:
    """Elements of what latent attention may store once for all heads."""

    latent: int
    rotary: int
    expansion: Expansion


def latent_dims(  # D201: V is a view of one Linear layer's result
    module: nn.Module, products: Sequence[Product], query: Tensor, key: Tensor, value: Tensor
) -> _LatentDims | None:
    """Return how K and V, [1, heads, tokens, dim], follow from latents; None if not, or if that takes more.

    On a device with numbers K has to hold them where it should.
    """
    own = set(module.children())
    made = next((x for x in products if x.linear in own and _storage(x.output) == _storage(value)), None)
    if made is None or query.shape[1] != key.shape[1]:
        return None
    bias: Tensor | None = made.linear.bias
    if bias is not None:
        return None
    heads, tokens, v_dim = value.shape[1:]
    width, rest = divmod(made.linear.out_features, heads)
    k_dim, rotary = width - v_dim, key.shape[3] - (width - v_dim)
    if rest or k_dim < 1 or rotary < 1 or made.input.numel() != tokens * made.linear.in_features:
        return None
    latent = made.linear.in_features
    if latent + rotary >= heads * (key.shape[3] + v_dim):
        return None
    parts = made.output.reshape(1, tokens, heads, width).transpose(1, 2)
    if (value.storage_offset(), value.stride()) != (k_dim, parts[..., k_dim:].stride()):
        return None
    if key.device.type != "meta" and not _holds(key, parts[..., :k_dim]):
        return None
    return _LatentDims(latent=latent, rotary=rotary, expansion=Expansion(k_dim=k_dim, v_dim=v_dim))


def _storage(tensor: Tensor) -> int:
    storage: int = tensor.untyped_storage()._cdata
    return storage


def _holds(key: Tensor, own: Tensor) -> bool:
    """True if K consists of that part and of another one that all heads share."""
    rest = key[..., own.shape[3] :]
    return torch.equal(key[..., : own.shape[3]], own) and torch.equal(rest, rest[:, :1].expand_as(rest))
