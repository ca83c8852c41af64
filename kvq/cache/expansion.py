"""The projection from latent vectors to keys and values of all heads, as attention over latents needs it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvq.errors import ModelError
from kvq.geometry import Expansion

_FEWEST_ROWS = 4  # of a product: BLAS takes another path for a single row


class LatentExpansion(nn.Module):
    """Takes the place of a model's Linear layer from latents to heads.

    While kvq's sessions attend, nothing is multiplied out: what comes in waits for the layer's attention, and
    what goes out are zeros of the right shape. For other attention functions it is the Linear layer that it
    was.
    """

    def __init__(self, weight: Tensor, q_heads: int, dims: Expansion, config: Any, name: str) -> None:
        """`weight`: [q_heads * (k_dim + v_dim), latent dim], for every head its key's rows, then its value's.

        `config`: the attention module's, which names the attention function. `name`: of sessions' one.
        """
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.q_heads = q_heads
        self.dims = dims
        self._config = config
        self._name = name
        self._waiting: Tensor | None = None

    def forward(self, latents: Tensor) -> Tensor:
        """[..., latent dim] -> [..., q_heads * (k_dim + v_dim)]."""
        if self._config._attn_implementation != self._name:
            return functional.linear(latents, self.weight)
        self._waiting = latents
        return latents.new_zeros(1).expand(*latents.shape[:-1], self.weight.shape[0])

    def take(self, tokens: int) -> Tensor:
        """The latents [tokens, 1, latent dim] that came in last.

        Raises:
            ModelError: they were taken, or are of other tokens.
        """
        found, self._waiting = self._waiting, None
        if found is None or found.numel() != tokens * self.weight.shape[1]:
            raise ModelError("a layer attends over other tokens than those whose latents it expanded")
        return found.reshape(tokens, 1, -1)

    @property
    def _heads(self) -> Tensor:
        """[q_heads, k_dim + v_dim, latent dim]."""
        return self.weight.view(self.q_heads, self.dims.k_dim + self.dims.v_dim, -1)

    def absorbed(self, q: Tensor) -> Tensor:
        """Queries of keys, [tokens, q_heads, k_dim + rotary], as queries of stored rows: those of the latent,
        then of the rotary part, [tokens, q_heads, latent dim + rotary]."""
        own, rotary = q.split((self.dims.k_dim, q.shape[2] - self.dims.k_dim), dim=-1)
        return torch.cat((_by_head(own, self._heads[:, : self.dims.k_dim]), rotary), dim=-1)

    def values(self, latents: Tensor) -> Tensor:
        """Of weighted sums of latents, [tokens, q_heads, latent dim], those of values, [.., .., v_dim]."""
        return _by_head(latents, self._heads[:, self.dims.k_dim :].transpose(1, 2))

    def expanded(self, rotary: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [q_heads, keys, dim] of stored rows [keys, dim], fp32."""
        heads = torch.matmul(latents, self._heads.float().transpose(1, 2))  # [q_heads, keys, k_dim + v_dim]
        own, values = heads.split((self.dims.k_dim, self.dims.v_dim), dim=-1)
        keys = torch.cat((own, rotary[None].expand(self.q_heads, -1, -1)), dim=-1)
        return keys, values


def _by_head(x: Tensor, weight: Tensor) -> Tensor:
    """x [tokens, heads, a] times weight [heads, a, b], head by head: [tokens, heads, b]."""
    padding = max(0, _FEWEST_ROWS - x.shape[0])
    rows = functional.pad(x, (0, 0, 0, 0, 0, padding)) if padding else x
    return torch.matmul(rows.transpose(0, 1), weight).transpose(0, 1)[: x.shape[0]]
