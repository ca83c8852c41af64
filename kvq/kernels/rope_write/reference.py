"""Reference `rope_write`: the definition of correct results."""

from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from kvq.errors import ConfigError
from kvq.kernels.paged import PagedKV
from kvq.kernels.rms_norm.reference import NormWeight, rms_norm
from kvq.kernels.rope.reference import rope
from kvq.kernels.write_kv.reference import write_kv

Angles = tuple[Tensor, Tensor]  # cos, sin: [rows, columns], of the heads' dtype


class Pairs(IntEnum):  # D145: three rules of pairs; one bool would misread GLM
    """Rules for the pairs of a head's elements that RoPE rotates, and for the columns of their angles."""

    HALVES = 0  # i and i + rotary_dim / 2, by column i: Llama, GPT-OSS and most others
    NEIGHBOURS = 1  # 2 i and 2 i + 1, by column i: GLM
    NEIGHBOURS_TWICE = 2  # 2 i and 2 i + 1, by column 2 i, since every angle is stored twice: Cohere


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerHeads:
    """Adjacent heads of a layer (queries, keys, values); one object is used for all steps.

    `norms`: norms of queries and keys, before RoPE. A weight [k_dim] normalizes each head separately, a
    weight [heads * k_dim] all heads together (OLMo 2).
    """

    q_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    rotary_dim: int = 0  # first elements of a head, to which RoPE applies; 0: none
    pairs: Pairs = Pairs.HALVES
    norms: tuple[NormWeight, NormWeight] | None = None
    bias: Tensor | None = None  # [width], of the heads' dtype
    centers: tuple[Tensor | None, Tensor | None] = (None, None)  # fp32 [kv_heads, dim], subtracted
    width: int = field(init=False)  # elements of all heads
    angle_columns: int = field(init=False)  # that are read

    @property
    def counts(self) -> list[int]:
        """Number of heads of queries, keys and values."""
        return [self.q_heads, self.kv_heads, self.kv_heads]

    def __post_init__(self) -> None:
        """Raise ConfigError unless all sizes match; otherwise, kernels would read out of bounds."""
        # kernels are launched often, so these are computed once
        object.__setattr__(
            self, "width", self.q_heads * self.k_dim + self.kv_heads * (self.k_dim + self.v_dim)
        )
        halved = 1 if self.pairs is Pairs.NEIGHBOURS_TWICE else 2
        object.__setattr__(self, "angle_columns", self.rotary_dim // halved)
        turned = self.rotary_dim % 2 == 0 and 0 <= self.rotary_dim <= self.k_dim
        norms = zip(self.norms or (), (self.q_heads, self.kv_heads), strict=False)
        weights = [n.weight.shape in ((self.k_dim,), (heads * self.k_dim,)) for n, heads in norms]
        biased = self.bias is None or self.bias.shape == (self.width,)
        centers = zip(self.centers, (self.k_dim, self.v_dim), strict=True)
        centered = [c is None or c.shape == (self.kv_heads, dim) for c, dim in centers]
        if not (turned and biased and all(weights) and all(centered)):
            raise ConfigError(
                f"norms, bias, centers or rotary_dim={self.rotary_dim} don't fit {self.q_heads} and "
                f"{self.kv_heads} heads with K of {self.k_dim} and V of {self.v_dim} elements"
            )


def rope_write(
    heads: Tensor, angles: Angles | None, kv: PagedKV, slots: Tensor, bad: Tensor, layer: LayerHeads
) -> None:
    """Apply norms and RoPE to queries, in place, and to keys; store keys and values in the blocks.

    `heads`: [rows, layer.width], with contiguous rows, as returned by the QKV product. `angles`: angles of
    every row, or None without RoPE; `slots`: int64 [tokens], all different. Rows from `tokens` on are
    padding, which is neither read nor written. `bad`: bool [rows], set to True where K or V before encoding
    contained a NaN or an infinity, which is stored as zero. Keys and values in `heads` are not changed.

    The sum with the bias, the norm, RoPE, and K and V minus their centers are each computed in fp32 and
    rounded to the heads' dtype.

    Raises:
        ConfigError: the shapes don't match.
    """
    check_rope_write(heads, angles, slots, bad, layer)
    tokens, dtype = len(slots), heads.dtype
    q, k, v = turned_heads(heads[:tokens], angles, layer)
    heads[:tokens, : layer.q_heads * layer.k_dim] = q.flatten(1)
    k, v = (
        part if center is None else (part.float() - center).to(dtype)
        for part, center in zip((k, v), layer.centers, strict=True)
    )
    bad[:tokens] |= write_kv(k, v, kv, slots)


def turned_heads(heads: Tensor, angles: Angles | None, layer: LayerHeads) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values after norms and RoPE, each [tokens, heads, dim], as copies or views."""
    rows = heads if layer.bias is None else heads + layer.bias
    dims = (layer.k_dim, layer.k_dim, layer.v_dim)
    parts = rows.split([count * dim for count, dim in zip(layer.counts, dims, strict=True)], 1)
    q, k, v = (part.unflatten(1, (count, -1)) for part, count in zip(parts, layer.counts, strict=True))
    if layer.norms is not None:
        q, k = (_normed(part, norm) for part, norm in zip((q, k), layer.norms, strict=True))
    if angles is not None and layer.rotary_dim:
        q, k = (_turned(part, angles, layer).to(heads.dtype) for part in (q, k))
    return q, k, v


def check_rope_write(
    heads: Tensor, angles: Angles | None, slots: Tensor, bad: Tensor, layer: LayerHeads
) -> None:
    """Raise ConfigError unless the tensors match."""
    tokens, shape, columns = slots.shape[0], heads.shape, layer.angle_columns
    fits = len(shape) == 2 and shape[1] == layer.width and heads.stride(1) == 1
    fits = fits and tokens <= shape[0] and tokens <= bad.shape[0]
    if angles is not None:
        (cos_rows, cos_columns), (sin_rows, sin_columns) = angles[0].shape, angles[1].shape
        fits = fits and min(cos_rows, sin_rows) >= tokens and min(cos_columns, sin_columns) >= columns
    if not fits:
        angled = [] if angles is None else [list(x.shape) for x in angles]
        raise ConfigError(
            f"rope_write takes heads [rows, {layer.width}] with elements side by side, and angles [tokens, "
            f"{columns} or more] and flags for {tokens} slots; got {list(shape)}, {angled} and "
            f"{bad.shape[0]} flags"
        )


def _normed(x: Tensor, norm: NormWeight) -> Tensor:
    """Normalize each head of [tokens, heads, dim], or all heads of a token together."""
    if norm.weight.shape == x.shape[-1:]:
        return rms_norm(x, norm.weight, norm.eps)
    return rms_norm(x.flatten(1), norm.weight, norm.eps).view(x.shape)


def _turned(x: Tensor, angles: Angles, layer: LayerHeads) -> Tensor:
    """Return heads [tokens, heads, dim] after RoPE, in fp32."""
    x, half = x.float(), layer.rotary_dim // 2
    part = x[..., : layer.rotary_dim]
    step = 2 if layer.pairs is Pairs.NEIGHBOURS_TWICE else 1
    cos, sin = (torch.cat([y[: len(x), : step * half : step].float()] * 2, 1) for y in angles)
    if layer.pairs is Pairs.HALVES:
        part = part.clone()
        rope(part, cos, sin)
    else:
        apart = torch.cat((part[..., ::2], part[..., 1::2]), -1)
        rope(apart, cos, sin)
        part = apart.unflatten(-1, (2, half)).transpose(-1, -2).flatten(-2)
    return torch.cat((part, x[..., layer.rotary_dim :]), -1)
