"""Projection from latent vectors to the keys and values of all heads, for attention over latents."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvq.errors import ModelError
from kvq.geometry import Expansion
from kvq.kernels.linear.cpu import CpuLinears

_FEWEST_ROWS = 4  # of a product: BLAS takes another code path for a single row


class LatentExpansion(nn.Module):  # D203: packed by head; torch pads one row to four
    """Replacement for a model's Linear layer from latents to heads.

    In a kvq session, no product is computed here: the input is kept for the layer's attention, and the output
    is zeros of the right shape. For other attention functions, the module behaves like the original Linear
    layer.
    """

    def __init__(
        self, weight: Tensor, q_heads: int, dims: Expansion, config: Any, name: str, *, packed: bool = False
    ) -> None:
        """`weight`: [q_heads * (k_dim + v_dim), latent dim]; for each head, the key's rows, then the value's.

        `config`: the attention module's config, which names the attention function. `name`: the name of the
        sessions' attention function. `packed`: whether to pack for kvq's own products on a CPU.
        """
        super().__init__()
        self.q_heads = q_heads
        self.dims = dims
        self.latent_dim = weight.shape[1]
        self._config = config
        self._name = name
        self._waiting: Tensor | None = None
        self._weight: nn.Parameter | None = None
        self._keys: CpuLinears | None = None
        self._values: CpuLinears | None = None
        if packed:
            keys, values = self._by_head(weight.detach())
            self._keys, self._values = CpuLinears(keys.transpose(1, 2)), CpuLinears(values)
        else:
            self._weight = nn.Parameter(weight.detach(), requires_grad=False)

    @property
    def packed_bytes(self) -> int:
        """Bytes held in addition to the parameters: the packed weight, if there is one."""
        return sum(held.nbytes for held in (self._keys, self._values) if held is not None)

    def forward(self, latents: Tensor) -> Tensor:
        """[..., latent dim] -> [..., q_heads * (k_dim + v_dim)]."""
        if self._config._attn_implementation != self._name:
            return functional.linear(latents, self._numbers().flatten(0, 1))
        self._waiting = latents
        return latents.new_zeros(1).expand(
            *latents.shape[:-1], self.q_heads * (self.dims.k_dim + self.dims.v_dim)
        )

    def take(self, tokens: int) -> Tensor:
        """Return the latents [tokens, 1, latent dim] of the last call.

        Raises:
            ModelError: the latents were already taken, or belong to other tokens.
        """
        found, self._waiting = self._waiting, None
        if found is None or found.numel() != tokens * self.latent_dim:
            raise ModelError("a layer attends over other tokens than those whose latents it expanded")
        return found.reshape(tokens, 1, -1)

    def absorbed(self, q: Tensor) -> Tensor:
        """Convert queries for keys, [tokens, q_heads, k_dim + rotary], to queries for stored rows, [tokens,
        q_heads, latent dim + rotary]: the latent part first, then the rotary part.
        """
        own, rotary = q.split((self.dims.k_dim, q.shape[2] - self.dims.k_dim), dim=-1)
        if self._keys is not None:
            found = self._keys(own, room=rotary.shape[2])
            found[..., self.latent_dim :] = rotary
            return found
        keys, _ = self._by_head(self._numbers())
        return torch.cat((_products(own, keys), rotary), dim=-1)

    def values(self, latents: Tensor) -> Tensor:
        """Convert weighted sums of latents, [tokens, q_heads, latent dim], to weighted sums of values."""
        if self._values is not None:
            return self._values(latents)
        _, values = self._by_head(self._numbers())
        return _products(latents, values.transpose(1, 2))

    def expanded(self, rotary: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [q_heads, keys, dim] for stored rows [keys, dim], fp32."""
        # [q_heads, keys, k_dim + v_dim]
        heads = torch.matmul(latents, self._numbers().float().transpose(1, 2))
        own, values = heads.split((self.dims.k_dim, self.dims.v_dim), dim=-1)
        keys = torch.cat((own, rotary[None].expand(self.q_heads, -1, -1)), dim=-1)
        return keys, values

    def _numbers(self) -> Tensor:
        """Return the weight, [q_heads, k_dim + v_dim, latent dim], unpacking it if necessary."""
        if self._keys is not None and self._values is not None:
            return torch.cat((self._keys.values().transpose(1, 2), self._values.values()), dim=1)
        assert self._weight is not None, "it is one or the other"
        return self._weight.view(self.q_heads, -1, self.latent_dim)

    def _by_head(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights of keys, [q_heads, k_dim, latent dim], and the weights of values."""
        heads = weight.view(self.q_heads, self.dims.k_dim + self.dims.v_dim, self.latent_dim)
        return heads[:, : self.dims.k_dim], heads[:, self.dims.k_dim :]


def _products(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [tokens, heads, a] by weight [heads, a, b], head by head: [tokens, heads, b]."""
    padding = max(0, _FEWEST_ROWS - x.shape[0])
    rows = functional.pad(x, (0, 0, 0, 0, 0, padding)) if padding else x
    return torch.matmul(rows.transpose(0, 1), weight).transpose(0, 1)[: x.shape[0]]
