"""Attention in fp64, one head at a time: what benchmarks check contenders against."""

import torch
from torch import Tensor


def exact_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of one sequence's last tokens.

    `q`: [new, q_heads, dim]; `k`, `v`: [kv_heads, keys, dim]. Returns fp64 [new, q_heads, dim].
    """
    new, q_heads, _ = q.shape
    heads, keys, _ = k.shape
    position = torch.arange(keys - new, keys, device=q.device)[:, None]
    hidden = torch.arange(keys, device=q.device) > position  # [new, keys]
    out = torch.empty(new, q_heads, v.shape[2], dtype=torch.float64, device=q.device)
    for head in range(q_heads):
        of = head * heads // q_heads
        scores = q[:, head].double() @ k[of].double().T * scale
        weights = torch.softmax(scores.masked_fill_(hidden, float("-inf")), dim=-1)
        out[:, head] = weights @ v[of].double()
    return out


def relative_error(got: Tensor, want: Tensor) -> float:
    """max|got - want| / max|want|."""
    return float((got.double() - want).abs().max() / want.abs().max())
